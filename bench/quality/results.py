"""The committed results: one JSON line a run, what counts as the same run, and the summary.

A line is found again by trainer, seed, budget, learning rate and the fingerprint of everything else
that decides it, so an interrupted bench goes on where it stopped, and a change of our settings does
not ask for the peer's runs again. Code is not in the fingerprint: the commit stands beside each
result, and --again repeats one. Of equal runs the last line counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.quality.settings import Settings
from stages import contracts
from stages.params import Params

OURS, PEER = "ours", "peer"
TRAINERS = (OURS, PEER)
FILE = Path("bench/quality.jsonl")

# of params.train: what the key has already, what the bench decides itself, what it leaves out
NOT_COUNTED = (
    "seed",
    "learning_rate",
    "num_epochs",
    "max_steps",
    "budget_s",
    "early_stop_patience",
    "early_stop_min_gain",
    "divergence_factor",
    "divergence_steps",
    "validations",
    "validation_anchors",
    "validation_min_blocks",
    "validation_replay_samples",
    "checkpoint_interval_s",
)

Row = dict[str, Any]

# of params.train: what the peer is given too
SHARED_TRAIN = (
    "dtype",
    "batch_tokens",
    "anchors_per_sample",
    "warmup_fraction",
    "min_learning_rate_fraction",
)


class Key(NamedTuple):
    trainer: str
    seed: int
    budget_core_s: float
    learning_rate: float
    fingerprint: str


def own_settings(
    trainer: str, *, data: str, params: Params, settings: Settings, num_threads: int
) -> dict[str, Any]:
    """Everything that decides a trainer's result but its seed, budget and learning rate. `data` is
    the data's fingerprint."""
    train = params.train.model_dump(mode="json")
    peer = settings.peer.model_dump(mode="json")
    if trainer == OURS:
        own = {k: v for k, v in train.items() if k not in NOT_COUNTED}
    else:
        own = {k: v for k, v in peer.items() if k != "learning_rate"}
        own |= {key: train[key] for key in SHARED_TRAIN}
    return {
        "data": data,
        "drafter": params.drafter.model_dump(mode="json"),
        "train": own,
        "budget": settings.budget.model_dump(mode="json"),
        "num_threads": num_threads,
    }


def learning_rates(trainer: str, *, params: Params, settings: Settings) -> tuple[float, float]:
    """The trainer's own peak learning rate, and the other one's."""
    ours, peer = params.train.learning_rate, settings.peer.learning_rate
    return (ours, peer) if trainer == OURS else (peer, ours)


def key_of(row: Row) -> Key:
    return Key(
        row["trainer"],
        row["seed"],
        float(row["budget_core_s"]),
        row["learning_rate"],
        contracts.fingerprint(row["settings"]),
    )


def index(rows: Iterable[Row]) -> dict[Key, Row]:
    """The last row of every key."""
    return {key_of(row): row for row in rows}


def best(rows: Iterable[Row]) -> Row | None:
    """The row with the greatest acceptance, the earlier one of equals."""
    return max(rows, key=lambda row: row["macro_acceptance_length"], default=None)


def summary(
    rows: Iterable[Row], *, budgets: Sequence[float], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Per budget the median over seeds of each trainer's acceptance, each seed at its better
    learning rate, and how far seeds spread.

    settings: each trainer's own_settings; rows of others are not counted. `ours` or `peer` is null
    where no seed has run.
    """
    wanted = {trainer: contracts.fingerprint(own) for trainer, own in settings.items()}
    counted = {k: row for k, row in index(rows).items() if wanted.get(k.trainer) == k.fingerprint}
    result: dict[str, Any] = {}
    for budget in budgets:
        entry: dict[str, Any] = {}
        reached: dict[str, list[float]] = {}
        for trainer in settings:
            here = [k for k in counted if k.trainer == trainer and k.budget_core_s == budget]
            chosen = {
                seed: best(counted[k] for k in here if k.seed == seed)
                for seed in sorted({k.seed for k in here})
            }
            values = [row["macro_acceptance_length"] for row in chosen.values() if row]
            reached[trainer] = values
            entry[trainer] = round(median(values), 3) if values else None
            entry[f"{trainer}_seeds"] = {
                str(seed): round(row["macro_acceptance_length"], 3)
                for seed, row in chosen.items()
                if row
            }
            entry[f"{trainer}_core_s"] = _median(chosen.values(), "core_s")
            entry[f"{trainer}_steps"] = _median(chosen.values(), "steps")
            entry[f"{trainer}_learning_rate"] = _median(chosen.values(), "learning_rate")
        spreads = [max(values) - min(values) for values in reached.values() if values]
        entry["spread"] = round(max(spreads), 3) if spreads else None
        if all(entry.get(trainer) is not None for trainer in TRAINERS):
            entry["ahead"] = round(entry[OURS] - entry[PEER], 3)
        result[f"budget_{budget:g}"] = entry
    return result


def _median(rows: Iterable[Row | None], name: str) -> float | None:
    values = [row[name] for row in rows if row]
    return median(values) if values else None
