"""The training loop: seeded batches, cosine schedule, validation, best weights, resume points.

With one process and float32, a run killed anywhere and started again ends with the same bits:
batches and anchors depend on (seed, epoch, document); the optimiser is in the resume point.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from stages.params import TrainParams
from stages.train.batches import plan_epoch
from stages.train.checkpoint import Progress, resume, save_best, save_latest
from stages.train.optimizer import Optimizer
from stages.train.passes import Passes, Sample
from stages.train.validation import validate


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything that stays the same over a run."""

    passes: Passes
    train: Sequence[Sample]
    validation: Sequence[Sample]
    folder: Path

    def run(self) -> Progress:
        """Trains to the last step and leaves the best weights in the folder. Raises ValueError when
        the loss is not finite; the best weights so far stay."""
        drafter, params = self.passes.drafter, self.passes.params
        plan = self._plan()
        optimizer = Optimizer(drafter, params)
        progress = resume(self.folder, drafter, optimizer)
        validate_at = {
            math.ceil(len(plan) * (i + 1) / params.validations) for i in range(params.validations)
        }
        saved_at = time.monotonic()
        losses: list[float] = []
        bar = tqdm(total=len(plan), initial=progress.step, desc="train", unit="step", mininterval=1)
        with bar:
            for epoch, documents in plan[progress.step :]:
                started = time.monotonic()
                losses.append(self._step(optimizer, progress.step, len(plan), epoch, documents))
                progress.step += 1
                progress.train_s += time.monotonic() - started
                bar.update()
                if progress.step in validate_at:
                    self._validate(progress, sum(losses) / len(losses))
                    losses.clear()
                    bar.set_postfix(
                        acceptance_length=progress.curve[-1]["validation_acceptance_length"]
                    )
                last = progress.step == len(plan)
                if last or time.monotonic() - saved_at > params.checkpoint_interval_s:
                    save_latest(self.folder, drafter, optimizer, progress)
                    saved_at = time.monotonic()
        return progress

    def _validate(self, progress: Progress, train_loss: float) -> None:
        loss, reached = validate(self.passes, self.validation)
        progress.curve.append(
            {
                "step": progress.step,
                "train_s": round(progress.train_s, 1),
                "train_loss": train_loss,
                "validation_loss": loss,
                "validation_acceptance_length": reached,
            }
        )
        if reached > progress.best_acceptance_length:
            progress.best_acceptance_length, progress.best_step = reached, progress.step
            save_best(self.folder, self.passes.drafter)

    def _plan(self) -> list[tuple[int, list[int]]]:
        params = self.passes.params
        lengths = [sample["num_tokens"] for sample in self.train]
        return [
            (epoch, documents)
            for epoch in range(params.num_epochs)
            for documents in plan_epoch(
                lengths,
                batch_tokens=params.batch_tokens,
                seed=params.seed * 1_000_003 + epoch,
            )
        ]

    def _step(
        self,
        optimizer: Optimizer,
        step: int,
        num_steps: int,
        epoch: int,
        documents: list[int],
    ) -> float:
        drafter, params = self.passes.drafter, self.passes.params
        seeds = [(params.seed * 1_000_003 + epoch) * 1_000_003 + document for document in documents]
        batch = self.passes.load(
            [self.train[i] for i in documents], params.anchors_per_sample, seeds
        )
        result = self.passes.forward(batch)
        loss = result.loss / result.weight.clamp(min=1e-6)
        if not bool(loss.isfinite()):
            raise ValueError(
                f"train: the loss is {loss.item()} at step {step} of {num_steps}; lower "
                f"train.learning_rate ({params.learning_rate}); the best weights so far are kept"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), params.max_grad_norm)
        optimizer.step(learning_rate(step, num_steps=num_steps, params=params))
        return float(loss.detach())


def learning_rate(step: int, *, num_steps: int, params: TrainParams) -> float:
    """Linear warm-up over warmup_fraction of the steps, then a cosine to the minimum."""
    warmup = max(1, round(params.warmup_fraction * num_steps))
    if step < warmup:
        return params.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    floor = params.min_learning_rate_fraction
    return params.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
