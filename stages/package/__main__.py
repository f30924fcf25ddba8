"""python -m stages.package --target DIR --drafter DIR --out DIR"""

from collections.abc import Mapping
from pathlib import Path

from stages import command
from stages.package import stage
from stages.params import Params, Services


def run(params: Params, services: Services, inputs: Mapping[str, Path], out: Path) -> None:
    stage.run(
        package=params.package,
        services=services,
        target=inputs["target"],
        drafter=inputs["drafter"],
        out=out,
    )


if __name__ == "__main__":
    command.main("package", inputs=("target", "drafter"), run=run)
