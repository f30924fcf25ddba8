"""Bootstrap intervals: they cover what they promise, repeat, and say nothing of a single prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stages.evaluate import intervals
from stages.evaluate.formulas import Rounds
from stages.params import DOMAINS


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_interval_covers_the_true_acceptance_length() -> None:
    """300 evaluations of 40 prompts, each prompt with an acceptance rate of its own."""
    world = np.random.default_rng(7)
    truth, covered = 1 + 5 * 0.3, 0
    for trial in range(300):
        rounds = []
        for _ in range(40):
            rate = world.beta(3, 7)  # mean 0.3
            accepted = world.binomial(5, rate, size=20)
            rounds.append(Rounds((5,) * 20, tuple(int(a) for a in accepted)))
        found = intervals.interval(
            intervals.acceptance_samples(rounds, draw=draw(trial), resamples=400)
        )
        assert found is not None
        covered += found[0] <= truth <= found[1]
    assert 0.90 <= covered / 300 <= 0.98


def test_a_median_lies_in_its_interval_and_more_prompts_narrow_it() -> None:
    values = np.random.default_rng(3).lognormal(0.2, 0.3, size=400).tolist()
    widths = []
    for number in (16, 400):
        found = intervals.interval(
            intervals.median_samples(values[:number], draw=draw(), resamples=500)
        )
        assert found is not None
        assert found[0] <= float(np.median(values[:number])) <= found[1]
        widths.append(found[1] - found[0])
    assert widths[1] < widths[0]


def rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Six responses and four pairs a domain; the last domain drafts nothing."""
    world = np.random.default_rng(seed)
    acceptance, speed = [], []
    for domain in DOMAINS:
        for _ in range(6):
            accepted = [] if domain == DOMAINS[-1] else world.integers(0, 5, size=10).tolist()
            acceptance.append(
                {
                    "domain": domain,
                    "drafted": [4] * len(accepted),
                    "accepted": accepted,
                    "num_tokens": 1 + sum(accepted) + len(accepted),
                    "finish_reason": "length",
                }
            )
        for _ in range(4):
            timing = {"num_tokens": 101, "first_s": 0.0, "last_s": 1.0}
            faster = {**timing, "last_s": float(world.uniform(0.5, 0.9))}
            speed.append({"domain": domain, "drafter": faster, "baseline": timing})
    return acceptance, speed


def bootstrap(acceptance: Any, speed: Any, *, seed: int) -> dict[str, Any]:
    return intervals.bootstrap(acceptance, speed, min_speed_tokens=32, resamples=300, seed=seed)


def test_the_same_seed_gives_the_same_intervals() -> None:
    acceptance, speed = rows(0)
    found = bootstrap(acceptance, speed, seed=1)
    assert found == bootstrap(acceptance, speed, seed=1)
    assert found != bootstrap(acceptance, speed, seed=2)
    assert tuple(found["domains"]) == DOMAINS
    assert found["domains"][DOMAINS[-1]]["acceptance_length"] is None
    widths = [
        domain["acceptance_length"][1] - domain["acceptance_length"][0]
        for domain in found["domains"].values()
        if domain["acceptance_length"]
    ]
    low, high = found["macro_acceptance_length"]
    assert 1 < low < high < 5
    assert high - low < sorted(widths)[len(widths) // 2]
    low, high = found["macro_speedup"]
    assert 1 < low < high < 2


def test_a_macro_interval_averages_within_domains() -> None:
    """Reference: the domains' own resamples, averaged one by one."""
    acceptance, speed = rows(4)
    samples = []
    for index, domain in enumerate(DOMAINS[:-1]):
        own = [row for row in acceptance if row["domain"] == domain]
        generator = np.random.default_rng([9, index])
        picks = generator.integers(len(own), size=(300, len(own)))
        samples.append(
            [
                1
                + sum(sum(own[i]["accepted"]) for i in pick)
                / sum(len(own[i]["drafted"]) for i in pick)
                for pick in picks
            ]
        )
    means = [sum(values) / len(values) for values in zip(*samples, strict=True)]
    expected = [float(np.quantile(means, q)) for q in (0.025, 0.975)]
    assert bootstrap(acceptance, speed, seed=9)["macro_acceptance_length"] == pytest.approx(
        expected
    )


def test_one_prompt_or_none_gives_no_interval() -> None:
    acceptance, speed = rows(0)
    one = bootstrap(acceptance[:1], speed[:1], seed=1)
    assert one["macro_acceptance_length"] is None
    assert one["macro_speedup"] is None
    assert one["domains"][DOMAINS[0]] == {"acceptance_length": None, "speedup": None}
    assert bootstrap([], [], seed=1)["macro_speedup"] is None
