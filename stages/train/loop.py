"""The training loop: seeded batches, cosine schedule, validation, best weights, resume points.

With one process and float32, a run killed anywhere and started again ends with the same bits:
batches and anchors depend on (seed, epoch, document); the optimiser is in the resume point.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stages.dspark.acceptance import (
    acceptance_length,
    expected_acceptance,
    leading_matches,
    walk,
)
from stages.dspark.model import Drafter
from stages.dspark.slots import anchor_candidates
from stages.dspark.step import Batch, Frozen, LossWeights, StepResult, forward_batch
from stages.params import TrainParams
from stages.shards import ShardReader
from stages.train.batches import load_batch, plan_epoch
from stages.train.checkpoint import Progress, resume, save_best, save_latest
from stages.train.optimizer import Optimizer

Sample = dict[str, Any]
VALIDATION_SEED = 7  # anchors of the validation blocks are the same at every validation


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything that stays the same over a run."""

    drafter: Drafter
    frozen: Frozen
    reader: ShardReader
    train: Sequence[Sample]
    validation: Sequence[Sample]
    params: TrainParams
    device: torch.device
    folder: Path

    def run(self) -> Progress:
        """Trains to the last step and leaves the best weights in the folder. Raises ValueError when
        the loss is not finite; the best weights so far stay."""
        params = self.params
        plan = self._plan()
        optimizer = Optimizer(self.drafter, params)
        progress = resume(self.folder, self.drafter, optimizer)
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
                    save_latest(self.folder, self.drafter, optimizer, progress)
                    saved_at = time.monotonic()
        return progress

    def _plan(self) -> list[tuple[int, list[int]]]:
        lengths = [sample["num_tokens"] for sample in self.train]
        return [
            (epoch, documents)
            for epoch in range(self.params.num_epochs)
            for documents in plan_epoch(
                lengths,
                batch_tokens=self.params.batch_tokens,
                seed=self.params.seed * 1_000_003 + epoch,
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
        params = self.params
        seeds = [(params.seed * 1_000_003 + epoch) * 1_000_003 + document for document in documents]
        batch = self._load([self.train[i] for i in documents], params.anchors_per_sample, seeds)
        result = self._forward(batch)
        loss = result.loss / result.weight.clamp(min=1e-6)
        if not bool(loss.isfinite()):
            raise ValueError(
                f"train: the loss is {loss.item()} at step {step} of {num_steps}; lower "
                f"train.learning_rate ({params.learning_rate}); the best weights so far are kept"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), params.max_grad_norm)
        optimizer.step(learning_rate(step, num_steps=num_steps, params=params))
        return float(loss.detach())

    def _load(self, samples: Sequence[Sample], num_anchors: int, seeds: Sequence[int]) -> Batch:
        batch = load_batch(self.reader, samples, num_anchors=num_anchors, seeds=seeds)
        if self.params.dtype == "float32":
            batch = batch._replace(planes=batch.planes.float(), last=batch.last.float())
        return Batch(*(tensor.to(self.device, non_blocking=True) for tensor in batch))

    def _forward(self, batch: Batch) -> StepResult:
        params = self.params
        weights = LossWeights(
            ce=params.ce_weight,
            tv=params.tv_weight,
            confidence=params.confidence_weight,
            position_decay=params.position_decay,
        )
        with self._autocast():
            return forward_batch(self.drafter, batch, self.frozen, weights=weights)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.params.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def _validation_batches(
        self, num_anchors: int | None
    ) -> Iterator[tuple[list[int], Batch, StepResult]]:
        """All validation documents, with `num_anchors` blocks each, or every possible one."""
        lengths = [sample["num_tokens"] for sample in self.validation]
        tokens = self.params.batch_tokens if num_anchors else self.params.batch_tokens // 4
        for documents in plan_epoch(lengths, batch_tokens=tokens, seed=VALIDATION_SEED):
            samples = [self.validation[i] for i in documents]
            most = max(sum(sample["loss_mask"]) for sample in samples)
            seeds = [VALIDATION_SEED + i for i in documents]
            batch = self._load(samples, num_anchors or most, seeds)
            yield documents, batch, self._forward(batch)

    def _validate(self, progress: Progress, train_loss: float) -> None:
        size = self.drafter.config.block_size
        survival, blocks = (
            torch.zeros(size, dtype=torch.float64),
            torch.zeros(size, dtype=torch.float64),
        )
        loss, weight = 0.0, 0.0
        for _, _, result in self._validation_batches(self.params.validation_anchors):
            batch_survival, batch_blocks = expected_acceptance(
                result.accept.cpu(), result.valid.cpu()
            )
            survival += batch_survival
            blocks += batch_blocks
            loss += float(result.loss)
            weight += float(result.weight)
        reached = acceptance_length(survival, blocks)
        progress.curve.append(
            {
                "step": progress.step,
                "train_s": round(progress.train_s, 1),
                "train_loss": train_loss,
                "validation_loss": loss / max(weight, 1e-6),
                "validation_acceptance_length": reached,
            }
        )
        if reached > progress.best_acceptance_length:
            progress.best_acceptance_length, progress.best_step = reached, progress.step
            save_best(self.folder, self.drafter)

    @torch.no_grad()
    def replay(self) -> dict[str, dict[str, float]]:
        """Greedy speculative decoding replayed over the validation responses, by domain.

        Exact for responses that the target decoded greedily: a draft is accepted as long as it is
        the next token, and until then its Markov previous tokens are the true ones.
        """
        totals: dict[str, list[int]] = {}
        for documents, batch, result in self._validation_batches(None):
            accepted = leading_matches(result.match & result.valid)
            for row, document in enumerate(documents):
                places = anchor_candidates(batch.loss_mask[row]).sum()
                total = totals.setdefault(self.validation[document]["domain"], [0, 0])
                for i, value in enumerate(walk(accepted[row, :places].tolist())):
                    total[i] += value
        return {
            domain: {"drafts": blocks, "acceptance_length": 1 + accepted / blocks}
            for domain, (blocks, accepted) in sorted(totals.items())
            if blocks
        }


def learning_rate(step: int, *, num_steps: int, params: TrainParams) -> float:
    """Linear warm-up over warmup_fraction of the steps, then a cosine to the minimum."""
    warmup = max(1, round(params.warmup_fraction * num_steps))
    if step < warmup:
        return params.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    floor = params.min_learning_rate_fraction
    return params.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
