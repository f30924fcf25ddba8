"""python -m stages.target --out data/target"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stages import command
from stages.params import Params, Services
from stages.target import stage


def run(params: Params, services: Services, inputs: Mapping[str, Path], out: Path) -> None:
    stage.run(target=params.target, out=out)


if __name__ == "__main__":
    command.main("target", inputs=(), run=run)
