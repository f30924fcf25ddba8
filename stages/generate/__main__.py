from collections.abc import Mapping
from pathlib import Path

from stages import command
from stages.generate import stage
from stages.params import Params, Services


def run(params: Params, services: Services, inputs: Mapping[str, Path], out: Path) -> None:
    stage.run(
        engine=params.engine,
        generate=params.generate,
        services=services,
        target=inputs["target"],
        prompts=inputs["prompts"],
        out=out,
    )


if __name__ == "__main__":
    command.main("generate", inputs=("target", "prompts"), run=run)
