"""Numbers under load against schedules laid out by hand, and the Pareto comparison."""

from __future__ import annotations

import heapq
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.evaluate import load, pareto
from stages.evaluate.formulas import Rounds
from stages.evaluate.load import Answer
from stages.evaluate.prompts import Prompt

lengths_of = st.lists(st.integers(1, 20), min_size=1, max_size=40)


def closed_loop(lengths: list[int], *, concurrency: int) -> list[Answer]:
    """A token a second and request; a slot that is free takes the next request at once."""
    slots = [0.0] * concurrency
    answers = []
    for tokens in lengths:
        sent = heapq.heappop(slots)
        times = tuple(sent + 1.0 + i for i in range(tokens))
        answers.append(Answer(sent, times[-1], times, None))
        heapq.heappush(slots, times[-1])
    return answers


@given(lengths_of, st.integers(1, 8))
def test_throughput_is_that_of_the_span_in_which_every_slot_is_busy(
    lengths: list[int], concurrency: int
) -> None:
    """With a token a second in each slot the busy span's throughput is the concurrency."""
    answers = closed_loop(lengths, concurrency=concurrency)
    found = load.side(answers, failed=0, concurrency=concurrency, min_speed_tokens=2)
    if len(lengths) >= concurrency:
        assert found["tokens_per_s"] == pytest.approx(concurrency)
        until = load.busy_until(answers, concurrency=concurrency)
        in_flight = sum(answer.sent_s < until <= answer.ended_s for answer in answers)
        assert in_flight == concurrency
    assert found["output_tokens"] == sum(lengths)
    assert found["elapsed_s"] == max(answer.ended_s for answer in answers)
    assert found["tokens_per_s"] >= found["output_tokens"] / found["elapsed_s"] - 1e-9


chunks_of = st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 5)), min_size=2, max_size=12)


@given(chunks_of)
def test_inter_token_gaps_average_to_the_time_per_output_token(
    chunks: list[tuple[float, int]],
) -> None:
    """One token in the first chunk, of the prefill; then gaps and how many tokens they bring."""
    times, now = [0.5], 0.5
    for gap, tokens in chunks:
        now += gap
        times += [now] * tokens
    gaps = load.inter_token_gaps(times)
    assert len(gaps) == len(times) - 1
    assert statistics.fmean(gaps) == pytest.approx((times[-1] - times[0]) / (len(times) - 1))


def test_a_side_counts_failures_and_rounds() -> None:
    rounds = Rounds((4, 4), (1, 3), undrafted=2)
    times = (1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 4.0, 5.0)
    found = load.side(
        [Answer(0.5, 5.0, times, rounds)], failed=2, concurrency=1, min_speed_tokens=4
    )
    assert (found["requests"], found["failed"], found["output_tokens"]) == (3, 2, 9)
    assert found["tokens_per_s"] == 2.0
    assert found["tokens_per_s_per_user"] == 2.0
    assert found["first_token_s"] == {"median": 0.5, "p95": 0.5}
    gaps = [0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 1.0, 1.0]
    assert found["inter_token_s"]["median"] == pytest.approx(np.median(gaps))
    assert found["inter_token_s"]["p95"] == pytest.approx(np.quantile(gaps, 0.95))
    assert found["acceptance_length"] == 3.0
    assert found["tokens_per_round"] == 2.0


def test_nothing_but_failures_is_a_side_without_numbers() -> None:
    found = load.side([], failed=3, concurrency=2, min_speed_tokens=4)
    assert (found["requests"], found["failed"], found["tokens_per_s"]) == (3, 3, 0.0)
    assert found["tokens_per_s_per_user"] is found["acceptance_length"] is None
    assert found["first_token_s"] == {"median": None, "p95": None}
    assert pareto.points({1: found}) == []


def test_the_workload_is_balanced_and_long_enough_for_its_slots() -> None:
    prompts = [Prompt(f"{domain}{n}", domain, [1]) for domain in "abc" for n in range(4)]
    few = load.workload(prompts, requests=6, concurrency=1)
    assert [prompt.id for prompt in few] == ["a0", "b0", "c0", "a1", "b1", "c1"]
    many = load.workload(prompts, requests=6, concurrency=8)
    assert len(many) == 32
    counts = [sum(prompt.domain == domain for prompt in many) for domain in "abc"]
    assert max(counts) - min(counts) <= 1


def side(user: float | None, whole: float) -> dict[str, float | None]:
    return {"tokens_per_s_per_user": user, "tokens_per_s": whole}


def test_throughput_is_compared_where_both_curves_were_measured() -> None:
    drafter = {1: side(60.0, 60.0), 4: side(40.0, 160.0), 16: side(10.0, 170.0)}
    baseline = {1: side(40.0, 40.0), 4: side(30.0, 120.0), 16: side(20.0, 300.0)}
    found = pareto.compare(drafter, baseline)
    assert found["matched"] == [
        {"interactivity": 20.0, **both(170 - 10 / 3, 300.0)},
        {"interactivity": 30.0, **both(170 - 20 / 3, 120.0)},
        {"interactivity": 40.0, **both(160.0, 40.0)},
    ]
    assert (found["best_ratio"], found["at_interactivity"]) == (4.0, 40.0)
    assert found["points"]["drafter"][1] == {
        "concurrency": 4,
        "interactivity": 40.0,
        "throughput": 160.0,
    }


def test_a_point_that_another_of_its_engine_beats_in_both_bends_no_curve() -> None:
    drafter = {1: side(50.0, 50.0), 2: side(30.0, 80.0)}
    disturbed = {1: side(25.0, 20.0), 2: side(40.0, 70.0), 4: side(20.0, 100.0)}
    found = pareto.compare(drafter, disturbed)
    assert len(found["points"]["baseline"]) == 3
    assert [row["interactivity"] for row in found["matched"]] == [30.0, 40.0]
    assert found["best_ratio"] == pytest.approx(80 / 85)


def both(drafter: float, baseline: float) -> dict[str, object]:
    return {
        "drafter": pytest.approx(drafter),
        "baseline": pytest.approx(baseline),
        "ratio": pytest.approx(drafter / baseline),
    }


def test_curves_that_do_not_meet_have_no_ratio() -> None:
    found = pareto.compare({1: side(60.0, 60.0)}, {1: side(40.0, 40.0), 2: side(None, 10.0)})
    assert (found["matched"], found["best_ratio"], found["at_interactivity"]) == ([], None, None)
    assert pareto.compare({}, {})["matched"] == []


curve_of = st.lists(st.tuples(st.floats(1, 100), st.floats(1, 500)), min_size=1, max_size=6)


@given(curve_of, curve_of)
def test_no_interactivity_between_the_reported_ones_has_a_better_ratio(
    drafter: list[tuple[float, float]], baseline: list[tuple[float, float]]
) -> None:
    curves = [
        [{"interactivity": x, "throughput": y} for x, y in points] for points in (drafter, baseline)
    ]
    rows = pareto.matched(*curves)
    if not rows:
        return
    best = max(row["ratio"] for row in rows)
    xs = np.linspace(rows[0]["interactivity"], rows[-1]["interactivity"], 50)
    values = [np.interp(xs, *pareto._curve(curve)) for curve in curves]
    assert (values[0] / values[1]).max() <= best * (1 + 1e-9)
