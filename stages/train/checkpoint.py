"""Resume points and best weights in the stage's working folder, safetensors only.

A resume point is one file, written by rename: weights, optimiser moments and, in its metadata, the
step, the best validation so far and the curve. So a kill at any moment leaves the last one whole.
Rank 0 reads and writes for all ranks; files hold whole tensors, whatever the number of ranks.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.dspark.model import Drafter
from stages.train.distributed import Ranks, part_of, whole
from stages.train.optimizer import Optimizer
from stages.train.schedule import PROBE_STEPS

LATEST, BEST = "latest.safetensors", "best.safetensors"


@dataclass
class Progress:
    """What a run has done so far."""

    step: int = 0
    num_steps: int | None = None  # unknown until a budget's probe is over
    train_s: float = 0.0
    step_s: list[float] = field(default_factory=list)  # of the first PROBE_STEPS
    loss_sum: float = 0.0  # since the last validation
    loss_count: int = 0
    best_step: int = -1
    best_acceptance_length: float = 0.0
    curve: list[dict[str, float | None]] = field(default_factory=list)

    def add(self, loss: float, *, seconds: float) -> None:
        """Counts one step."""
        self.step += 1
        self.train_s += seconds
        if len(self.step_s) < PROBE_STEPS:
            self.step_s.append(seconds)
        self.loss_sum += loss
        self.loss_count += 1

    def take_mean_loss(self) -> float:
        """The mean loss of the steps since it was last taken."""
        mean = self.loss_sum / self.loss_count
        self.loss_sum, self.loss_count = 0.0, 0
        return mean


def save_best(folder: Path, drafter: Drafter, ranks: Ranks) -> None:
    """In the packaged form."""
    tensors = _gather(dict(drafter.named_parameters()), ranks)
    if ranks.first:
        _write(folder / BEST, drafter.packaged(tensors), {})


def load_best(folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    return ranks.agreed_tensors(_read(folder / BEST)[0] if ranks.first else {})


def save_latest(
    folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, ranks: Ranks
) -> None:
    tensors = _gather(dict(model.named_parameters()) | optimizer.state(), ranks)
    if ranks.first:
        _write(folder / LATEST, tensors, {"progress": json.dumps(asdict(progress))})


def resume(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> Progress:
    """Restores the last resume point into model and optimiser; a fresh Progress where none is."""
    found = ranks.first and (folder / LATEST).is_file()
    if not ranks.agreed(found):
        return Progress()
    tensors, metadata = _read(folder / LATEST) if ranks.first else ({}, {})
    tensors, metadata = ranks.agreed_tensors(tensors), ranks.agreed(metadata)
    progress = Progress(**json.loads(metadata["progress"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part_of(tensors[name], parameter))
    optimizer.load_state(tensors)
    return progress


def _gather(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The whole tensors, on rank 0's CPU; nothing elsewhere."""
    found = {}
    for name, value in tensors.items():
        gathered = whole(value.detach())  # by all ranks, one tensor at a time
        if ranks.first:
            found[name] = gathered.cpu()
    return found


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    save_file({k: v.contiguous() for k, v in tensors.items()}, unfinished, metadata=metadata)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
