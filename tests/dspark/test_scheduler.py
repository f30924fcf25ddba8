"""The prefix scheduler: the best admission where there is one peak, and never a look ahead."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from stages.dspark.scheduler import (
    CostTable,
    admit,
    draft_gain,
    fixed_lengths,
    survival,
    threshold_lengths,
)

confidence = st.floats(0.0, 1.0, allow_nan=False)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, CostTable]:
    """Up to three requests of up to three slots, and an arbitrary step-wise cost table."""
    num_requests, num_slots = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = draw(
        st.lists(
            st.lists(confidence, min_size=num_slots, max_size=num_slots),
            min_size=num_requests,
            max_size=num_requests,
        )
    )
    most = num_requests * (1 + num_slots)
    rises = draw(st.lists(st.floats(0.0, 2.0), min_size=most, max_size=most))
    step_s = dict(enumerate(itertools.accumulate(rises, initial=1.0)))
    draft_s = draw(st.floats(0.01, 2.0))
    costs = CostTable(step_s=step_s, draft_s={1: draft_s}, max_tokens=most)
    return survival(torch.tensor(rows, dtype=torch.float64)), costs


def rate(survivals: Tensor, lengths: tuple[int, ...], costs: CostTable) -> float:
    """Tokens a second, written out anew."""
    tokens = sum(1 + length for length in lengths)
    gained = len(lengths) + sum(
        float(survivals[r, :length].sum()) for r, length in enumerate(lengths)
    )
    return gained / float(costs.step_s[tokens] + costs.draft_s[len(lengths)])


@given(cases())
def test_admission_equals_brute_force_over_all_lengths(case: tuple[Tensor, CostTable]) -> None:
    """The table is convex, so the quotient has one peak and the early stop finds it."""
    survivals, costs = case
    lengths = tuple(admit(survivals, costs).tolist())
    num_requests, num_slots = survivals.shape
    best = max(
        rate(survivals, option, costs)
        for option in itertools.product(range(num_slots + 1), repeat=num_requests)
    )
    assert rate(survivals, lengths, costs) == pytest.approx(best, rel=1e-9)


@given(cases(), st.data())
def test_a_slot_is_admitted_whatever_comes_at_and_after_its_token(
    case: tuple[Tensor, CostTable], data: st.DataObject
) -> None:
    """The token drafted at slot k decides the confidences of the later slots of its request alone:
    changing those changes nothing about slot k."""
    survivals, costs = case
    num_requests, num_slots = survivals.shape
    request = data.draw(st.integers(0, num_requests - 1))
    slot = data.draw(st.integers(0, num_slots - 1))
    later = torch.tensor(
        data.draw(
            st.lists(confidence, min_size=num_slots - slot - 1, max_size=num_slots - slot - 1)
        ),
        dtype=torch.float64,
    )
    changed = survivals.clone()
    changed[request, slot + 1 :] = survivals[request, slot] * later.cumprod(0)
    assume(survivals[request, slot] > 0)
    before, after = admit(survivals, costs), admit(changed, costs)
    assert (before[request] > slot) == (after[request] > slot)


def test_the_papers_counterexample_drafts_nothing_whatever_the_first_token_is() -> None:
    """Appendix A: throughputs of 1.0, 0.9 and (1.8 + a_2) * 0.45; looking ahead would verify the
    first token only where it leads to a confident second one."""
    costs = CostTable(step_s={1: 1.0, 2: 2.0, 3: 1 / 0.45}, draft_s={1: 1e-12}, max_tokens=3)
    # The paper's own curve is not convex; the scheduler is to be lossless on it as well.
    costs.step_s = torch.tensor([1.0, 1.0, 2.0, 1 / 0.45], dtype=torch.float64)
    lengths = {
        second: int(admit(survival(torch.tensor([[0.8, second]])), costs)[0])
        for second in (0.9, 0.0)
    }
    assert lengths == {0.9: 0, 0.0: 0}


def test_a_block_is_verified_whole_at_one_user_and_not_at_all_under_load() -> None:
    """The measured shape of a CPU: 30 ms up to 9 tokens, then 1.9 ms a token."""
    step_s = {n: max(0.030, 0.0129 + 0.0019 * n) for n in (1, 4, 8, 9, 16, 32, 128)}
    costs = CostTable(step_s=step_s, draft_s={1: 0.004, 16: 0.02}, max_tokens=128)
    block = survival(torch.tensor([[0.5, 0.5, 0.5, 0.4, 0.4]]))
    assert admit(block, costs).tolist() == [5]
    assert admit(block.expand(64, -1), costs).sum() == 0
    assert draft_gain(block, num_requests=1, costs=costs) > 1.3
    assert draft_gain(block, num_requests=64, costs=costs) < 1.0


def test_expected_gain_of_equal_blocks_is_that_of_the_admission() -> None:
    costs = CostTable(
        step_s={1: 0.03, 8: 0.03, 64: 0.12}, draft_s={1: 0.004, 8: 0.01}, max_tokens=64
    )
    block = survival(torch.tensor([[0.7, 0.6, 0.5]]))
    lengths = tuple(admit(block.expand(2, -1), costs).tolist())
    idle = 2 / float(costs.step_s[2])
    expected = rate(block.expand(2, -1), lengths, costs) / idle
    got = draft_gain(block.expand(8, -1), num_requests=2, costs=costs)
    assert got == pytest.approx(expected, rel=0.02)


@given(st.lists(st.floats(0.001, 5.0), min_size=2, max_size=12))
def test_the_cost_table_is_convex_and_never_above_what_was_measured(seconds: list[float]) -> None:
    points = {n + 1: s for n, s in enumerate(seconds)}
    costs = CostTable(step_s=points, draft_s={1: 1.0}, max_tokens=20)
    inner = costs.step_s[1 : len(seconds) + 1]
    assert all(float(inner[n - 1]) <= s + 1e-9 for n, s in points.items())
    assert bool((inner.diff().diff() >= -1e-9).all())
    assert float(costs.step_s[20]) >= float(inner[-1]) - 1e-9


def test_fixed_and_threshold_lengths() -> None:
    survivals = survival(torch.tensor([[0.9, 0.5, 0.9], [0.2, 0.9, 0.9]]))
    assert fixed_lengths(survivals, length=2).tolist() == [2, 2]
    assert fixed_lengths(survivals, length=9).tolist() == [3, 3]
    assert threshold_lengths(survivals, threshold=0.44).tolist() == [2, 0]


def test_a_table_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="target step needs positive times"):
        CostTable(step_s={}, draft_s={1: 1.0}, max_tokens=4)
    with pytest.raises(ValueError, match="draft pass needs positive times"):
        CostTable(step_s={1: 1.0}, draft_s={1: 0.0}, max_tokens=4)
