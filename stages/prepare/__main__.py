"""python -m stages.prepare --target data/target --authored data/authored --out data/prompts"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stages import command
from stages.params import Params, Services
from stages.prepare import stage


def run(params: Params, services: Services, inputs: Mapping[str, Path], out: Path) -> None:
    target, authored = inputs["target"], inputs["authored"]
    stage.run(prepare=params.prepare, target=target, authored=authored, out=out)


if __name__ == "__main__":
    command.main("prepare", inputs=("target", "authored"), run=run)
