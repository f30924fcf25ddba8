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
# What an engine did: (drafted, accepted) of every decode round; a scheduler may draft 0..BLOCK.
steps_of = st.lists(
    st.integers(0, BLOCK).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=30
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
    if not rounds.drafts:
        return
    survival = formulas.survival(rounds, num_positions=BLOCK)
    product = 1.0
    reach = formulas.reached(rounds, num_positions=BLOCK)
    for rate, survived in zip(formulas.conditional(survival, reach), survival, strict=True):
        if rate is None:
            assert product == pytest.approx(0.0)
        else:
            product *= rate
            assert product == pytest.approx(survived)


def as_vllm_lists(steps: list[tuple[int, int]]) -> Rounds:
    """Per request, vLLM lists the rounds that drafted at least one token."""
    drafted = [step for step in steps if step[0]]
    return Rounds(tuple(d for d, _ in drafted), tuple(a for _, a in drafted))


@given(steps_of)
def test_ragged_drafts_are_counted_as_they_were(steps: list[tuple[int, int]]) -> None:
    """Reference: every round laid out, its outcome at each position looked at one by one."""
    num_tokens = 1 + sum(accepted + 1 for _, accepted in steps)
    rounds = formulas.trimmed(as_vllm_lists(steps), num_tokens=num_tokens, finish_reason="stop")
    assert (rounds.drafts, rounds.drafts + rounds.undrafted) == (
        sum(drafted > 0 for drafted, _ in steps),
        len(steps),
    )
    per_round = formulas.tokens_per_round(rounds)
    if not steps:
        assert per_round is None
    else:
        assert per_round == pytest.approx((num_tokens - 1) / len(steps))
    survival = formulas.survival(rounds, num_positions=BLOCK)
    reach = formulas.reached(rounds, num_positions=BLOCK)
    length = formulas.acceptance_length(rounds)
    if length is not None:
        formulas.check_identity(length, survival)
        assert per_round is not None
        assert per_round <= length + 1e-9
    for position, rate in enumerate(formulas.conditional(survival, reach), start=1):
        outcomes = []
        for drafted, accepted in steps:
            slots = ["yes"] * accepted + ["no"] * (drafted - accepted)
            if len(slots) >= position and "no" not in slots[: position - 1]:
                outcomes.append(slots[position - 1] == "yes")
        assert rate == (pytest.approx(sum(outcomes) / len(outcomes)) if outcomes else None)


@given(steps_of, st.integers(0, BLOCK), st.sampled_from(["stop", "length"]))
def test_a_cut_last_block_hides_at_most_itself(
    steps: list[tuple[int, int]], surplus: int, reason: str
) -> None:
    """Tokens behind the end are in the last round: everything before it is counted exactly."""
    if not steps:
        return
    surplus = min(surplus, steps[-1][1])
    num_tokens = 1 + sum(accepted + 1 for _, accepted in steps) - surplus
    listed = as_vllm_lists(steps)
    rounds = formulas.trimmed(listed, num_tokens=num_tokens, finish_reason=reason)
    without = sum(drafted == 0 for drafted, _ in steps)
    assert 0 <= without - rounds.undrafted <= surplus
    assert rounds.accepted[:-1] == listed.accepted[:-1]
    if surplus == 0 or without == 0:
        assert rounds.undrafted == without
    if without == 0 and reason == "stop":
        assert formulas.tokens_per_round(rounds) == pytest.approx((num_tokens - 1) / len(steps))


@given(st.lists(steps_of, max_size=4))
def test_rounds_of_responses_add_up(responses: list[list[tuple[int, int]]]) -> None:
    def of(steps: list[tuple[int, int]]) -> Rounds:
        num_tokens = 1 + sum(accepted + 1 for _, accepted in steps)
        return formulas.trimmed(as_vllm_lists(steps), num_tokens=num_tokens, finish_reason="stop")

    whole = [step for steps in responses for step in steps]
    assert formulas.together(map(of, responses)) == of(whole)


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


def test_counters_are_kept_by_series() -> None:
    assert formulas.parse_counters(PAGE) == {
        DRAFTS: {'{engine="0",model_name="m"}': 10.0, '{engine="1",model_name="m"}': 2.0}
    }
    assert formulas.parse_counters("a_total 3.0\n") == {"a": {"": 3.0}}


def test_several_engines_are_summed_and_a_new_one_counts_from_zero() -> None:
    before, after = {DRAFTS: {"0": 10.0}}, {DRAFTS: {"0": 14.0, "1": 3.0}}
    assert formulas.counter_difference(before, after, names=[DRAFTS]) == {DRAFTS: 7.0}
    assert formulas.counter_difference({}, after, names=[DRAFTS]) == {DRAFTS: 17.0}
    with pytest.raises(ValueError, match="does not speculate"):
        formulas.counter_difference({}, {}, names=[DRAFTS])


@pytest.mark.parametrize("now", [{"0": 900.0, "1": 3.0}, {"0": 900.0}])
def test_a_reset_of_one_engine_is_found_though_the_sum_grew(now: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"drafts1 fell from 5.0 to (3.0|None).*restarted"):
        formulas.counter_difference({DRAFTS: {"0": 10.0, "1": 5.0}}, {DRAFTS: now}, names=[DRAFTS])
