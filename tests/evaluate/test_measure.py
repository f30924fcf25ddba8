"""Counters against requests, failures, and the losslessness verdict."""

from __future__ import annotations

from typing import Any

import pytest

from stages.evaluate import lossless, measure
from stages.evaluate.measure import ACCEPTED, DRAFTED, DRAFTS, Failure
from stages.evaluate.prompts import Prompt, first_of_each, spread


def session(**more: float) -> dict[str, Any]:
    requests = {DRAFTS: 100.0, DRAFTED: 400.0, ACCEPTED: 80.0}
    counters = {
        name: value + more.get(name.rsplit("_", 1)[-1], 0) for name, value in requests.items()
    }
    return {
        "prompts": 10,
        "retries": [],
        "failed": 0,
        "counters": counters,
        "per_request": requests,
    }


def test_counters_that_agree_give_no_warning() -> None:
    assert measure.check_session(session(), block_size=4, shared=False) == []


def test_a_last_block_a_request_is_a_warning_with_numbers() -> None:
    (warning,) = measure.check_session(session(drafts=10), block_size=4, shared=False)
    assert "differ" in warning
    assert "110.0" in warning


def test_more_than_that_is_an_error_unless_others_use_the_server() -> None:
    with pytest.raises(ValueError, match="more than one block a request"):
        measure.check_session(session(drafts=11), block_size=4, shared=False)
    assert measure.check_session(session(drafts=11), block_size=4, shared=True)
    retried = {**session(drafts=11), "retries": ["qa-0: broke off"]}
    assert measure.check_session(retried, block_size=4, shared=False)


def test_failed_requests_are_counted_and_quoted() -> None:
    measure.raise_failures([], of=3)
    with pytest.raises(ValueError, match=r"1 of 3 requests failed(.|\n)*qa-0: dead"):
        measure.raise_failures([Failure("qa-0", "dead")], of=3)


def decoded(**changes: Any) -> dict[str, Any]:
    same = [[1, 2, 3], [4, 5]]
    return {"plain": same, "batch_1": same, "batch_all": same, "num_drafts": 3, **changes}


def test_equal_outputs_are_counted() -> None:
    assert lossless.judge(decoded(), ids=["a", "b"]) == {"checked": 2, "identical": 2}


def test_the_first_difference_is_named() -> None:
    changed = decoded(batch_all=[[1, 2, 3], [4, 6]])
    with pytest.raises(ValueError, match=r"batch_all, prompt b\): response token 1 is \[6\]"):
        lossless.judge(changed, ids=["a", "b"])
    shorter = decoded(batch_1=[[1, 2], [4, 5]])
    with pytest.raises(ValueError, match=r"prompt a\): response token 2 is missing"):
        lossless.judge(shorter, ids=["a", "b"])


def test_a_run_without_drafts_proves_nothing() -> None:
    with pytest.raises(ValueError, match="tested nothing"):
        lossless.judge(decoded(num_drafts=0), ids=["a", "b"])


def test_lossless_prompts_are_spread_and_speed_prompts_are_the_first() -> None:
    prompts = [Prompt(f"{domain}{n}", domain, [1]) for domain in "abc" for n in range(3)]
    assert [p.id for p in spread(prompts, count=5)] == ["a0", "b0", "c0", "a1", "b1"]
    assert [p.id for p in first_of_each(prompts, limit=1)] == ["a0", "b0", "c0"]
    assert len(spread(prompts, count=99)) == 9
