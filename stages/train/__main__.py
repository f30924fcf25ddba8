"""python -m stages.train --target DIR --hidden-states DIR --out DIR"""

from collections.abc import Mapping
from pathlib import Path

from stages import command
from stages.params import Params, Services
from stages.train import distributed, stage


def run(params: Params, services: Services, inputs: Mapping[str, Path], out: Path) -> None:
    if services.train.num_processes > 1 and not distributed.is_rank():
        distributed.launch(services.train)
        return
    stage.run(
        drafter=params.drafter,
        train=params.train,
        services=services,
        target=inputs["target"],
        hidden_states=inputs["hidden_states"],
        out=out,
    )


if __name__ == "__main__":
    command.main("train", inputs=("target", "hidden_states"), run=run)
