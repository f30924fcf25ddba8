"""Runs what is missing in the results file, one run after the other, and appends each result."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.quality import budget, data, results
from bench.quality.data import Data
from bench.quality.problem import Problem, held_out, macro
from bench.quality.results import OURS, Key, Row
from bench.quality.settings import Settings
from stages import contracts
from stages.journal import Journal
from stages.params import Params, Services
from stages.train.schedule import learning_rate


@dataclass(frozen=True, kw_only=True)
class Order:
    """What was asked for."""

    prompts: Path
    seeds: Sequence[int]
    budgets: Sequence[float]  # core-seconds
    trainers: Sequence[str]
    num_threads: int
    all_rates: bool
    again: bool
    cache: Path
    file: Path


@dataclass(kw_only=True)
class Bench:
    order: Order
    params: Params
    services: Services
    settings: Settings
    _problem: Problem | None = field(default=None, init=False)

    def run(self) -> dict[str, Any]:
        """Runs what is missing and returns the summary of all seeds in the file."""
        data_fingerprint = contracts.fingerprint(self._recipe())
        own = {
            trainer: results.own_settings(
                trainer,
                data=data_fingerprint,
                params=self.params,
                settings=self.settings,
                num_threads=self.order.num_threads,
            )
            for trainer in self.order.trainers
        }
        self.order.file.parent.mkdir(parents=True, exist_ok=True)
        with Journal(self.order.file) as journal:
            fresh: set[Key] = set()
            for seed in self.order.seeds:
                for trainer in self.order.trainers:
                    for row in self._rows(trainer, own[trainer], seed, journal, fresh):
                        tqdm.write(_line(row))
            return results.summary(journal.rows, budgets=self.order.budgets, settings=own)

    def _rows(
        self, trainer: str, own: dict[str, Any], seed: int, journal: Journal, fresh: set[Key]
    ) -> Iterator[Row]:
        """A trainer's result at every budget: both learning rates at the smallest one, the better
        of the two at the others."""
        rates = results.learning_rates(trainer, params=self.params, settings=self.settings)
        smallest, *others = sorted(self.order.budgets)
        rows = []
        for rate in dict.fromkeys(rates):
            rows.append(self._row(trainer, own, seed, smallest, rate, journal, fresh))
            yield rows[-1]
        chosen = results.best(rows)
        assert chosen is not None
        for core_s in others:
            for rate in dict.fromkeys(rates) if self.order.all_rates else [chosen["learning_rate"]]:
                yield self._row(trainer, own, seed, core_s, rate, journal, fresh)

    def _row(
        self,
        trainer: str,
        own: dict[str, Any],
        seed: int,
        core_s: float,
        rate: float,
        journal: Journal,
        fresh: set[Key],
    ) -> Row:
        key = Key(trainer, seed, core_s, rate, contracts.fingerprint(own))
        found = results.index(journal.rows).get(key)
        if found is not None and (key in fresh or not self.order.again):
            return found
        row = self._measure(trainer, own, seed, core_s, rate)
        journal.append(row)
        journal.sync()
        fresh.add(key)
        return row

    def _measure(
        self, trainer: str, own: dict[str, Any], seed: int, core_s: float, rate: float
    ) -> Row:
        problem = self.problem()
        torch.set_num_threads(self.order.num_threads)
        contender, run = budget.train(
            _builder(trainer, problem, settings=self.settings, seed=seed, rate=rate),
            budget_core_s=core_s,
            schedule=self._factor,
            settings=self.settings.budget,
            name=f"{trainer}, seed {seed}, {core_s:g} core-s, rate {rate:g}",
        )
        # A diverged drafter proposes nothing that would be accepted.
        sets = {} if run.diverged else held_out(problem, contender.packaged())
        return {
            "trainer": trainer,
            "seed": seed,
            "budget_core_s": core_s,
            "learning_rate": rate,
            "macro_acceptance_length": 1.0 if run.diverged else macro(sets),
            "sets": sets,
            **run._asdict(),
            "samples": {"train": len(problem.data.train), "test": len(problem.data.test)},
            "counts": problem.data.counts,
            "settings": own,
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
        }

    def _factor(self, step: int, num_steps: int) -> float:
        """Of the peak learning rate: the profile's schedule over a known number of steps."""
        params = self.params.train.model_copy(update={"budget_s": None})
        return learning_rate(step, num_steps=num_steps, params=params) / params.learning_rate

    def problem(self) -> Problem:
        """The data and what follows from it; made when the first run needs it."""
        if self._problem is None:
            self._problem = Problem.of(self.make_data(), self.params)
        return self._problem

    def make_data(self) -> Data:
        return data.make(
            self.order.prompts,
            recipe=self._recipe(),
            params=self.params,
            services=self.services,
            settings=self.settings,
            cache=self.order.cache,
        )

    def _recipe(self) -> dict[str, Any]:
        return data.recipe(self.order.prompts, params=self.params, settings=self.settings)


def _builder(
    trainer: str, problem: Problem, *, settings: Settings, seed: int, rate: float
) -> Callable[[], budget.Contender]:
    if trainer == OURS:
        from bench.quality.ours import Ours

        return lambda: Ours(problem, seed=seed, learning_rate=rate)
    from bench.quality.peer import Peer  # speculators takes seconds to import

    return lambda: Peer(problem, settings=settings.peer, seed=seed, learning_rate=rate)


def _line(row: Row) -> str:
    sets = ", ".join(f"{name} {e['acceptance_length']:.2f}" for name, e in row["sets"].items())
    reached = "diverged" if row["diverged"] else f"{row['macro_acceptance_length']:.3f} ({sets})"
    return (
        f"{row['trainer']}: seed {row['seed']}, rate {row['learning_rate']:g}, {row['steps']} "
        f"steps in {row['core_s']:.0f} of {row['budget_core_s']:g} core-s: {reached}"
    )


def _commit() -> str:
    """The checkout's commit, with a plus where files that are tracked differ from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
