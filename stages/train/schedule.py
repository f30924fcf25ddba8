"""How long a run is and what happens at which step. Pure: lengths, params and the curve alone.

A run's length comes from exactly one of train.max_steps, train.budget_s and train.num_epochs. With
a budget it is unknown until PROBE_STEPS steps are timed, so those are the whole warm-up: their
learning rate depends on nothing that is not known yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from stages.params import TrainParams
from stages.train.batches import plan_epoch

PROBE_STEPS = 20
UNTIMED_STEPS = 3  # of the probe: allocators and caches fill

Step = tuple[int, list[int]]
"""An epoch and the documents of one batch in it."""


def plan(lengths: Sequence[int], params: TrainParams) -> Iterator[Step]:
    """Batches of epoch after epoch, without end: a run takes as many as it has steps."""
    epoch = 0
    while True:
        for documents in plan_epoch(
            lengths, batch_tokens=params.batch_tokens, seed=epoch_seed(params, epoch)
        ):
            yield epoch, documents
        epoch += 1


def epoch_seed(params: TrainParams, epoch: int) -> int:
    return params.seed * 1_000_003 + epoch


def known_steps(lengths: Sequence[int], params: TrainParams) -> int | None:
    """The run's steps; None where train.budget_s decides (steps_in_budget)."""
    if params.budget_s is not None:
        return None
    if params.max_steps is not None:
        return params.max_steps
    return sum(
        len(plan_epoch(lengths, batch_tokens=params.batch_tokens, seed=epoch_seed(params, epoch)))
        for epoch in range(params.num_epochs)
    )


def steps_in_budget(step_s: Sequence[float], *, budget_s: float) -> int:
    """The run's steps from the seconds of its first PROBE_STEPS; never fewer than those."""
    timed = step_s[UNTIMED_STEPS:PROBE_STEPS]
    left_s = budget_s - sum(step_s[:PROBE_STEPS])
    return PROBE_STEPS + max(0, int(left_s / (sum(timed) / len(timed))))


def validation_steps(num_steps: int, *, validations: int) -> set[int]:
    """After which steps to validate: evenly spaced, the last one among them."""
    return {math.ceil(num_steps * (i + 1) / validations) for i in range(validations)}


def learning_rate(step: int, *, num_steps: int | None, params: TrainParams) -> float:
    """Linear warm-up over warmup_fraction of the steps (with a budget: over PROBE_STEPS), then a
    cosine to the minimum. num_steps may be None before a budget's probe is over."""
    if params.budget_s is not None:
        warmup = PROBE_STEPS
    else:
        assert num_steps is not None
        warmup = max(1, round(params.warmup_fraction * num_steps))
    if step < warmup:
        return params.learning_rate * (step + 1) / warmup
    assert num_steps is not None
    done = (step - warmup) / max(1, num_steps - warmup)
    floor = params.min_learning_rate_fraction
    return params.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def stalled(curve: Sequence[Mapping[str, float | None]], params: TrainParams) -> bool:
    """Whether the last early_stop_patience validations gained less than early_stop_min_gain over
    the best before them. Read from the curve, so a resumed run stops where it would have."""
    if params.early_stop_patience is None:
        return False
    reached, waited = -math.inf, 0
    for row in curve:
        found = row["validation_acceptance_length"] or 0.0
        if found >= reached + params.early_stop_min_gain:
            reached, waited = found, 0
        else:
            waited += 1
    return waited >= params.early_stop_patience
