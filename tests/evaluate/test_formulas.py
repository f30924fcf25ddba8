"""The evaluation's numbers against references written the slow way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.evaluate import formulas
from stages.evaluate.formulas import Pair, Rounds

BLOCK = 5
rounds_of = st.lists(st.integers(0, BLOCK), max_size=30).map(
    lambda accepted: Rounds((BLOCK,) * len(accepted), tuple(accepted))
)
speeds = st.floats(1.0, 500.0)


@given(rounds_of)
def test_acceptance_length_counts_the_tokens_a_round_brings(rounds: Rounds) -> None:
    """Reference: lay every token of every round out and count."""
    laid_out = [["draft"] * accepted + ["bonus"] for accepted in rounds.accepted]
    length = formulas.acceptance_length(rounds)
    if not laid_out:
        assert length is None
    else:
        assert length == pytest.approx(sum(map(len, laid_out)) / len(laid_out))


@given(rounds_of)
def test_acceptance_length_is_one_plus_the_sum_of_survival(rounds: Rounds) -> None:
    survival = formulas.survival(rounds, num_positions=BLOCK)
    reference = [
        len([a for a in rounds.accepted if a >= k]) / max(1, len(rounds.accepted))
        for k in range(1, BLOCK + 1)
    ]
    assert survival == pytest.approx(reference)
    assert survival == sorted(survival, reverse=True)
    length = formulas.acceptance_length(rounds)
    if length is not None:
        formulas.check_identity(length, survival)


def test_more_accepted_than_a_block_holds_is_an_error() -> None:
    impossible = Rounds((4,), (4,))
    length = formulas.acceptance_length(impossible)
    assert length is not None
    with pytest.raises(ValueError, match="not 1 \\+ the sum of survival"):
        formulas.check_identity(length, formulas.survival(impossible, num_positions=3))


@given(rounds_of)
def test_conditional_rates_multiply_to_survival(rounds: Rounds) -> None:
    survival = formulas.survival(rounds, num_positions=BLOCK)
    product = 1.0
    for rate, survived in zip(formulas.conditional(survival), survival, strict=True):
        if rate is None:
            assert product == pytest.approx(0.0)
        else:
            product *= rate
            assert product == pytest.approx(survived)


@given(rounds_of, st.integers(0, BLOCK))
def test_tokens_behind_the_end_are_not_counted(rounds: Rounds, surplus: int) -> None:
    """Reference: the response keeps its first tokens; a round's drafts come before its bonus."""
    if not rounds.accepted:
        return
    laid_out = 1 + sum(accepted + 1 for accepted in rounds.accepted)
    surplus = min(surplus, rounds.accepted[-1])  # at least one token of the last round is kept
    num_tokens = laid_out - surplus
    kept_of_last = rounds.accepted[-1] + 1 - surplus
    expected = min(rounds.accepted[-1], kept_of_last) if surplus == 0 else kept_of_last
    found = formulas.trimmed(rounds, num_tokens=num_tokens, finish_reason="stop")
    assert found.accepted[:-1] == rounds.accepted[:-1]
    assert found.accepted[-1] == (rounds.accepted[-1] - surplus)
    assert expected - found.accepted[-1] in (0, 1)
    cut = formulas.trimmed(rounds, num_tokens=num_tokens, finish_reason="length")
    assert cut == rounds


def test_speed_leaves_the_first_token_out() -> None:
    assert formulas.speed(num_tokens=11, first_s=1.0, last_s=3.0) == 5.0
    assert formulas.speed(num_tokens=1, first_s=1.0, last_s=1.0) is None
    assert formulas.speed(num_tokens=3, first_s=1.0, last_s=1.0) is None


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), speeds, speeds), max_size=9))
def test_a_domains_speed_is_the_median_of_pairs_that_are_long_enough(
    raw: list[tuple[int, int, float, float]],
) -> None:
    found = formulas.domain_speed([Pair(*one) for one in raw], min_tokens=32)
    counted = [one for one in raw if one[0] >= 32 and one[1] >= 32]
    assert found.pairs == len(counted)
    if not counted:
        assert (found.drafter, found.baseline, found.ratio) == (None, None, None)
        return
    ratios = sorted(one[2] / one[3] for one in counted)
    middle = len(ratios) // 2
    reference = ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
    assert found.ratio == pytest.approx(reference)


@given(st.lists(st.one_of(st.none(), speeds), max_size=9))
def test_macro_averages_leave_out_what_was_not_measured(values: list[float | None]) -> None:
    known = [value for value in values if value is not None]
    if not known:
        assert formulas.geometric_mean(values) is None
        assert formulas.mean(values) is None
        return
    product = math.prod(known) ** (1 / len(known))
    assert formulas.geometric_mean(values) == pytest.approx(product)
    assert formulas.mean(values) == pytest.approx(sum(known) / len(known))


PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""
DRAFTS = "vllm:spec_decode_num_drafts"


def test_counters_are_summed_over_their_labels() -> None:
    assert formulas.parse_counters(PAGE) == {DRAFTS: 12.0}


def test_a_counter_that_ran_backwards_means_a_restarted_server() -> None:
    assert formulas.counter_difference({}, {DRAFTS: 3.0}, names=[DRAFTS]) == {DRAFTS: 3.0}
    with pytest.raises(ValueError, match=r"fell from 5.0 to 3.0.*restarted"):
        formulas.counter_difference({DRAFTS: 5.0}, {DRAFTS: 3.0}, names=[DRAFTS])
    with pytest.raises(ValueError, match="does not speculate"):
        formulas.counter_difference({}, {}, names=[DRAFTS])
