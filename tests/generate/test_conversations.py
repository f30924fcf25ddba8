"""Policies: what stays of a response, and under which reason a row is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from stages.contracts import Rejected
from stages.generate.conversations import Judged, check_prompt, judge, row
from stages.params import GenerateParams, Params

MASK = 4
LOOP = [11, 12, 13, 14, 15, 16, 17, 18, 19] * 4


def settings(params: Params, **changes: Any) -> GenerateParams:
    return params.generate.model_copy(update={"loop_ngram": 8, "loop_repeats": 3, **changes})


def verdict(response: list[int], generate: GenerateParams, *, reason: str = "stop") -> Any:
    return judge(response, finish_reason=reason, generate=generate, mask_token_id=MASK)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("keep", Judged(36, truncated=True, looping=True)),
        ("cap", Judged(9, truncated=True, looping=True)),
    ],
)
def test_a_looping_response_is_kept_or_capped(
    params: Params, policy: str, expected: Judged
) -> None:
    assert verdict(LOOP, settings(params, looping=policy), reason="length") == expected


@pytest.mark.parametrize(
    ("response", "changes", "finish_reason", "reason"),
    [
        ([], {}, "stop", "empty"),
        ([9, MASK, 9], {}, "stop", "mask_token"),
        ([9, 9], {"truncated": "drop"}, "length", "truncated"),
        (LOOP, {"looping": "drop"}, "stop", "looping"),
    ],
)
def test_each_fault_has_its_reason(
    params: Params, response: list[int], changes: Any, finish_reason: str, reason: str
) -> None:
    found = verdict(response, settings(params, **changes), reason=finish_reason)
    assert isinstance(found, Rejected)
    assert found.reason == reason


def test_a_prompt_must_leave_room_for_the_response_and_the_extraction() -> None:
    def check(num_tokens: int) -> Rejected | None:
        return check_prompt([9] * num_tokens, max_tokens=10, max_model_len=64, mask_token_id=MASK)

    assert check(53) is None
    refused = check(54)
    assert refused is not None
    assert refused.reason == "too_long"
    marked = check_prompt([9, MASK], max_tokens=10, max_model_len=64, mask_token_id=MASK)
    assert marked is not None
    assert marked.reason == "mask_token"


def test_exactly_the_responses_tokens_carry_loss() -> None:
    prompt = {"id": "a", "domain": "qa", "split": "train"}
    made = row(prompt, input_ids=[1, 2, 3], response=[7, 8], finish_reason="stop", looping=True)
    assert made["input_ids"] == [1, 2, 3, 7, 8]
    assert made["loss_mask"] == [False, False, False, True, True]
    assert made["looping"]
