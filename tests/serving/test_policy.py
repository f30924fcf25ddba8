"""When the proposer drafts, and how much of it is verified."""

from __future__ import annotations

import pytest
import torch

from stages.dspark.scheduler import CostTable, Overhead
from stages.serving.policy import EVERY, FEWEST, PROBE, DraftPolicy

NUM_SLOTS = 4


def policy(scheduler: str, **changes: object) -> DraftPolicy:
    made = DraftPolicy(scheduler=scheduler, num_slots=NUM_SLOTS, threshold=0.3, **changes)  # type: ignore[arg-type]
    made.costs = CostTable(
        step_s={1: 0.03, 8: 0.03, 16: 0.05, 128: 0.25}, draft_s={1: 0.004, 16: 0.02}, max_tokens=640
    )
    return made


def draft(made: DraftPolicy, num_requests: int, confidence: float) -> list[int] | None:
    """One round: lengths, or None where nothing was drafted."""
    if not made.wants_draft(num_requests):
        return None
    confidences = torch.full((num_requests, NUM_SLOTS), confidence)
    return made.lengths(confidences, may_draft=torch.ones(num_requests, dtype=torch.bool))


def test_fixed_drafts_the_block_threshold_cuts_it_and_none_never_drafts() -> None:
    assert draft(policy("fixed"), 2, 0.1) == [4, 4]
    assert draft(policy("threshold"), 1, 0.6) == [2]  # 0.6, 0.36, 0.216
    assert draft(policy("none"), 1, 0.9) is None


def test_a_request_that_may_not_draft_gets_no_length_and_teaches_nothing() -> None:
    made = policy("fixed")
    made.wants_draft(1)
    mask = torch.tensor([True, False])
    assert made.lengths(torch.full((2, NUM_SLOTS), 0.9), may_draft=mask) == [4, 0]
    assert len(made._recent) == 1


def test_prefix_stops_drafting_under_load_probes_and_comes_back() -> None:
    made = policy("prefix")
    for _ in range(FEWEST):
        assert draft(made, 1, 0.5) is not None
    idle = [draft(made, 64, 0.5) is None for _ in range(2 * PROBE)]
    assert sum(idle) > 1.8 * PROBE
    assert not all(idle), "a probe"
    back = [draft(made, 1, 0.5) is not None for _ in range(EVERY)]
    assert all(back)


def test_prefix_learns_from_a_probe_that_the_text_became_predictable() -> None:
    made = policy("prefix")
    for _ in range(FEWEST + EVERY):
        draft(made, 1, 0.02)
    assert draft(made, 1, 0.02) is None
    answers = [draft(made, 1, 0.95) for _ in range(80 * PROBE)]
    assert answers[-1] == [4]


def test_prefix_learns_what_rounds_take_beyond_the_cost_table() -> None:
    """Drafts that pay off by the table alone, and rounds that take 40 ms more with them."""
    made = policy("prefix")
    assert made.costs is not None
    assert made.overhead == Overhead()
    drafted = []
    for _ in range(4 * PROBE):
        lengths = draft(made, 2, 0.5)
        drafted.append(lengths is not None)
        num_tokens = 2 + sum(lengths or [])
        known, late = float(made.costs.step_s[num_tokens]), 0.001
        if drafted[-1]:
            known, late = known + float(made.costs.draft_s[2]), 0.040
        made.took(known + late, num_requests=2, num_tokens=num_tokens)
        made.took(9.0, num_requests=2, num_tokens=200)  # a prefill, which teaches nothing
    assert sum(drafted[:PROBE]) >= PROBE - 1
    assert sum(drafted[2 * PROBE :]) <= 2, "probes"
    assert made.overhead == pytest.approx((0.040, 0.001))


def test_temperatures_change_what_is_verified() -> None:
    hot = policy("threshold", temperatures=[4.0] * NUM_SLOTS)
    assert draft(hot, 1, 0.9) == [2]  # 0.634, 0.40, 0.25
    assert draft(policy("threshold"), 1, 0.9) == [4]


def test_statistics_count_rounds_and_slots_and_start_anew_when_taken() -> None:
    made = policy("threshold")
    draft(made, 2, 0.6)
    taken = made.take_statistics()
    assert (taken["rounds"], taken["drafted_rounds"], taken["requests"]) == (1, 1, 2)
    assert taken["drafted_per_slot"] == [2, 2, 0, 0]
    assert made.take_statistics()["rounds"] == 0


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast': expected one of"):
        policy("fast")
