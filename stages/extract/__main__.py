from collections.abc import Mapping
from pathlib import Path

from stages import command
from stages.extract import stage
from stages.params import Params, Services


def run(params: Params, services: Services, inputs: Mapping[str, Path], out: Path) -> None:
    stage.run(
        engine=params.engine,
        extract=params.extract,
        services=services,
        target=inputs["target"],
        conversations=inputs["conversations"],
        out=out,
    )


if __name__ == "__main__":
    command.main("extract", inputs=("target", "conversations"), run=run)
