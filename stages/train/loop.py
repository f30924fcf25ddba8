"""The training loop: seeded batches, cosine schedule, validation, best weights, resume points.

With one process and float32, a run killed anywhere and started again ends with the same bits:
batches and anchors depend on (seed, epoch, document); optimiser and run length are in the resume
point.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stages.states.source import Loaded, Sample
from stages.train import schedule
from stages.train.checkpoint import BEST, Progress, resume, save_best, save_latest
from stages.train.curves import SELECTED_BY, curve_row
from stages.train.distributed import whole
from stages.train.divergence import Divergence, Watch
from stages.train.optimizer import Optimizer
from stages.train.passes import Passes
from stages.train.report import Bar
from stages.train.supervision import Mask
from stages.train.validation import Validator


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything that stays the same over a run."""

    passes: Passes
    train: Sequence[Sample]
    mask: Mask  # the tokens that it trains on
    validator: Validator
    folder: Path

    def run(self) -> Progress:
        """Trains to the last step, or until the acceptance length stalls; leaves the best weights
        in the folder. Raises ValueError when the run diverges: the best weights and the last good
        resume point stay."""
        params, ranks = self.passes.params, self.passes.ranks
        optimizer = Optimizer(self.passes.drafter, params)
        progress = resume(self.folder, self.passes.drafter, optimizer, ranks)
        lengths = [sample["num_tokens"] for sample in self.train]
        if progress.num_steps is None:
            progress.num_steps = schedule.known_steps(lengths, params)
        plan = itertools.islice(schedule.plan(lengths, params), progress.step, None)
        ahead = itertools.islice(schedule.plan(lengths, params), progress.step, progress.num_steps)
        watch = Watch(params)
        with (
            Bar(progress, params, shown=ranks.first) as bar,
            self.passes.source.read(
                self.passes.upcoming(self.train, (documents for _, documents in ahead))
            ) as states,
        ):
            saved_at = time.monotonic()
            while progress.step != progress.num_steps and not schedule.stalled(
                progress.curve, params
            ):
                started = time.monotonic()
                epoch, documents = next(plan)
                loss = self._step(optimizer, watch, progress, epoch, documents, states)
                seconds = time.monotonic() - started
                progress.add(loss, seconds=seconds)
                bar.step(progress, loss=loss, seconds=seconds)
                known = progress.num_steps is not None
                if progress.step == schedule.PROBE_STEPS and not known:
                    self._fix_length(progress, bar)
                    saved_at = float("-inf")  # its resume point holds the length from here on
                if self._validation_is_due(progress):
                    started = time.monotonic()
                    self._validate(progress)
                    bar.validated(seconds=time.monotonic() - started)
                last = progress.step == progress.num_steps
                due = ranks.agreed(time.monotonic() - saved_at > params.checkpoint_interval_s)
                if last or (due and not watch.suspicious):
                    save_latest(self.folder, self.passes.drafter, optimizer, progress, ranks)
                    saved_at = time.monotonic()
            if progress.step != progress.num_steps:
                save_latest(self.folder, self.passes.drafter, optimizer, progress, ranks)
                bar.say(
                    f"train: stopped at step {progress.step} of {progress.num_steps}: "
                    f"{params.early_stop_patience} validations gained less than "
                    f"{params.early_stop_min_gain} (train.early_stop_patience, "
                    "train.early_stop_min_gain)"
                )
        return progress

    def _fix_length(self, progress: Progress, bar: Bar) -> None:
        budget_s = self.passes.params.budget_s
        assert budget_s is not None
        progress.num_steps = self.passes.ranks.agreed(
            schedule.steps_in_budget(progress.step_s, budget_s=budget_s)
        )
        bar.say(
            f"train: train.budget_s {budget_s:g} is {progress.num_steps} steps, from the first "
            f"{schedule.PROBE_STEPS} ({sum(progress.step_s):.1f} s)"
        )

    def _validation_is_due(self, progress: Progress) -> bool:
        if progress.num_steps is None:
            return False
        return progress.step in schedule.validation_steps(
            progress.num_steps, validations=self.passes.params.validations
        )

    def _validate(self, progress: Progress) -> None:
        progress.curve.append(
            {
                "step": progress.step,
                "train_s": round(progress.train_s, 1),
                "train_loss": progress.take_mean_loss(),
                **curve_row(
                    self.validator.validate(self.passes),
                    domains=self.validator.domains,
                    min_blocks=self.passes.params.validation_min_blocks,
                ),
            }
        )
        reached = progress.curve[-1][SELECTED_BY]
        assert reached is not None, "every held-out sample has a block"
        if reached > progress.best_acceptance_length:
            progress.best_acceptance_length, progress.best_step = reached, progress.step
            save_best(self.folder, self.passes.drafter, self.passes.ranks)

    def _step(
        self,
        optimizer: Optimizer,
        watch: Watch,
        progress: Progress,
        epoch: int,
        documents: list[int],
        states: Iterator[Loaded | None],
    ) -> float:
        drafter, params = self.passes.drafter, self.passes.params
        seed = schedule.epoch_seed(params, epoch)
        own, loaded = self.passes.share(documents)
        batch = self.passes.load(
            [self.train[i] for i in loaded],
            states,
            params.anchors_per_sample,
            [seed * 1_000_003 + document for document in loaded],
            mask=self.mask,
            without_blocks=not own,
        )
        result = self.passes.forward(batch)
        loss, weight = self.passes.ranks.total(torch.stack([result.loss.detach(), result.weight]))
        weight = weight.clamp(min=1e-6)
        # Times the number of ranks, as they average: the gradient of the quotient of the sums.
        (result.loss / weight * self.passes.ranks.size).backward()
        norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), params.max_grad_norm)
        value = float(loss / weight)
        try:
            watch.check(step=progress.step, loss=value, gradient_norm=float(whole(norm)))
        except Divergence as error:
            raise ValueError(f"train: {error}; {self._advice(progress)}") from None
        optimizer.step(
            schedule.learning_rate(progress.step, num_steps=progress.num_steps, params=params)
        )
        return value

    def _advice(self, progress: Progress) -> str:
        kept = (
            f"the best weights so far (step {progress.best_step}, acceptance length "
            f"{progress.best_acceptance_length:.3f}) are in {self.folder / BEST}"
            if progress.curve
            else "there was no validation yet, so there are no good weights"
        )
        return (
            f"lower train.learning_rate ({self.passes.params.learning_rate}) or "
            f"train.max_grad_norm ({self.passes.params.max_grad_norm}); {kept} until a run with "
            "other params starts"
        )
