"""Training for a number of core-seconds: the process's CPU time over batches, step and optimiser.

A contender is built twice. The first one is thrown away after a few timed steps, which give the
number of steps; the second one trains with a schedule that ends there. After a quarter of the steps
the number is set once more, from what that quarter cost (the cosine has hardly begun to fall). So
both schedules end at the budget, and neither trainer pays for the timing. Building and judging are
not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor
from tqdm import tqdm

from bench.quality.settings import BudgetSettings

WARM_STEPS = 2  # of the timing, left out of its mean: first allocations, cold files


class Contender(Protocol):
    """A trainer with its model, its optimiser and its batches."""

    def step(self, factor: float) -> float:
        """Loads the next batch and trains on it at `factor` times the peak learning rate. Returns
        the loss."""

    def packaged(self) -> dict[str, Tensor]:
        """The trained drafter under its packaged names."""


class Run(NamedTuple):
    """What a run cost. A diverged run ended early, at a loss that is not finite."""

    steps: int
    core_s: float
    wall_s: float
    diverged: bool


def train(
    build: Callable[[], Contender],
    *,
    budget_core_s: float,
    schedule: Callable[[int, int], float],
    settings: BudgetSettings,
    name: str,
) -> tuple[Contender, Run]:
    """Trains a contender for the budget. schedule(step, num_steps) is the factor of the peak
    learning rate."""
    num_steps = steps_for(build(), budget_core_s=budget_core_s, settings=settings)
    contender = build()
    started, core = time.monotonic(), time.process_time()
    step, set_again, diverged = 0, num_steps // 4, False
    with tqdm(total=num_steps, desc=name, unit="step", mininterval=2.0) as bar:
        while step < num_steps and not diverged:
            loss = contender.step(schedule(step, num_steps))
            step += 1
            diverged = not math.isfinite(loss)
            spent = time.process_time() - core
            if step == set_again:
                num_steps = bar.total = max(step + 1, round(step * budget_core_s / spent))
            bar.set_postfix_str(f"{spent:.0f} core-s, loss {loss:.3f}", refresh=False)
            bar.update()
    run = Run(
        steps=step,
        core_s=round(time.process_time() - core, 1),
        wall_s=round(time.monotonic() - started, 1),
        diverged=diverged,
    )
    off = run.core_s / budget_core_s - 1
    if not diverged and abs(off) > settings.tolerance:
        tqdm.write(
            f"{name}: {run.core_s} core-s instead of {budget_core_s:.0f} ({off:+.0%}); was the "
            "machine busy with something else?"
        )
    return contender, run


def steps_for(contender: Contender, *, budget_core_s: float, settings: BudgetSettings) -> int:
    """How many steps the budget pays for, from the mean of the first few."""
    costs: list[float] = []
    most = settings.timing_fraction * budget_core_s
    while len(costs) < WARM_STEPS + settings.timing_steps:
        core = time.process_time()
        contender.step(0.0)
        costs.append(time.process_time() - core)
        if len(costs) > WARM_STEPS and sum(costs) > most:
            break
    counted = costs[WARM_STEPS:]
    return max(1, round(budget_core_s * len(counted) / sum(counted)))
