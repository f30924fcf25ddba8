"""python -m stages.evaluate --target DIR --prompts DIR --package DIR --out DIR"""

from collections.abc import Mapping
from pathlib import Path

from stages import command
from stages.evaluate import stage
from stages.params import Params, Services


def run(params: Params, services: Services, inputs: Mapping[str, Path], out: Path) -> None:
    stage.run(
        engine=params.engine,
        generate=params.generate,
        serve=params.serve,
        evaluate=params.evaluate,
        services=services,
        inputs=inputs,
        out=out,
    )


if __name__ == "__main__":
    command.main("evaluate", inputs=("target", "prompts", "package"), run=run)
