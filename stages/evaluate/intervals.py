"""Bootstrap intervals over prompts: how far a number would move with other prompts of its kind.

A domain's prompts are drawn again with replacement, as many as there are, and its number computed
anew; macro averages draw within every domain. The interval holds the middle 95% of the results.
It says nothing of drift of the machine or of another training seed. Pure; milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.evaluate import formulas, results
from stages.evaluate.formulas import Rounds
from stages.params import DOMAINS

Samples = npt.NDArray[np.float64]
"""[R], one value a resample; nan where a resample has none."""

Interval = list[float] | None
LEVEL = 0.95


def bootstrap(
    acceptance: Sequence[Mapping[str, Any]],
    speed: Sequence[Mapping[str, Any]],
    *,
    min_speed_tokens: int,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """serving.json's `intervals`, from the rows that results.aggregate takes.

    null where there are fewer than two prompts to draw from; such a domain enters a macro interval
    with its value.
    """
    lengths: list[Samples] = []
    ratios: list[Samples] = []
    domains: dict[str, dict[str, Interval]] = {}
    for index, name in enumerate(DOMAINS):
        draw = np.random.default_rng([seed % 2**32, index])
        rounds = [results.response_rounds([row]) for row in acceptance if row["domain"] == name]
        pairs = formulas.counted_speeds(
            (results.pair(row) for row in speed if row["domain"] == name),
            min_tokens=min_speed_tokens,
        )
        lengths.append(acceptance_samples(rounds, draw=draw, resamples=resamples))
        ratios.append(
            median_samples([a / b for a, b in pairs], draw=draw, resamples=resamples),
        )
        domains[name] = {
            "acceptance_length": interval(lengths[-1]),
            "speedup": interval(ratios[-1]),
        }
    return {
        "macro_acceptance_length": interval(_mean(lengths)),
        "macro_speedup": interval(np.exp(_mean([np.log(one) for one in ratios]))),
        "domains": domains,
    }


def acceptance_samples(
    rounds: Sequence[Rounds], *, draw: np.random.Generator, resamples: int
) -> Samples:
    """[R] acceptance lengths of resampled responses; one response's rounds an item."""
    if not rounds:
        return np.full(resamples, np.nan)
    accepted = np.array([sum(one.accepted) for one in rounds], dtype=np.float64)
    drafts = np.array([one.drafts for one in rounds], dtype=np.float64)
    chosen = draw.integers(len(rounds), size=(resamples, len(rounds)))
    with np.errstate(invalid="ignore"):
        lengths: Samples = 1 + accepted[chosen].sum(axis=1) / drafts[chosen].sum(axis=1)
    return lengths


def median_samples(
    values: Sequence[float], *, draw: np.random.Generator, resamples: int
) -> Samples:
    """[R] medians of resampled values."""
    if not values:
        return np.full(resamples, np.nan)
    chosen = draw.integers(len(values), size=(resamples, len(values)))
    medians: Samples = np.median(np.asarray(values, dtype=np.float64)[chosen], axis=1)
    return medians


def interval(samples: Samples) -> Interval:
    """[low, high] around the middle LEVEL of the samples; None where they do not vary or are none.

    Samples of a single prompt are all equal: they say nothing of other prompts.
    """
    known = samples[np.isfinite(samples)]
    if not len(known) or np.ptp(known) == 0:
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return [float(low), float(high)]


def _mean(samples: Sequence[Samples]) -> Samples:
    """[R] means over the domains that have a value in that resample."""
    stacked = np.stack(samples)
    known = np.isfinite(stacked)
    count = known.sum(axis=0)
    total = np.where(known, stacked, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
