"""From a response to a row of conversations.parquet, or to the reason why there is none. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.contracts import Rejected
from stages.loops import loop_start
from stages.params import GenerateParams

TRUNCATED = "length"  # the finish reason of a response that ran into max_tokens


@dataclass(frozen=True)
class Judged:
    """A response after the policies. `num_kept` tokens of it stay and carry loss."""

    num_kept: int
    truncated: bool
    looping: bool


def check_prompt(
    prompt: Sequence[int], *, max_tokens: int, max_model_len: int, mask_token_id: int
) -> Rejected | None:
    """Why a rendered prompt cannot be sent, or None.

    One token of the context stays free: extraction sends prompt and response as a prompt, and vLLM
    generates at least one token.
    """
    if len(prompt) + max_tokens + 1 > max_model_len:
        return Rejected(
            "too_long",
            f"{len(prompt)} prompt tokens + generate.max_tokens={max_tokens} + 1 exceed "
            f"engine.max_model_len={max_model_len}",
        )
    if mask_token_id in prompt:
        return Rejected("mask_token", f"the prompt holds the mask token {mask_token_id}")
    return None


def judge(
    response: Sequence[int], *, finish_reason: str, generate: GenerateParams, mask_token_id: int
) -> Judged | Rejected:
    """Applies the policies of params to a response."""
    if not response:
        return Rejected("empty", f"no token, finish reason {finish_reason}")
    if mask_token_id in response:
        return Rejected("mask_token", f"the response holds the mask token {mask_token_id}")
    truncated = finish_reason == TRUNCATED
    if truncated and generate.truncated == "drop":
        return Rejected("truncated", f"ran into generate.max_tokens={generate.max_tokens}")
    second = loop_start(response, ngram=generate.loop_ngram, repeats=generate.loop_repeats)
    if second is None or generate.looping == "keep":
        return Judged(len(response), truncated=truncated, looping=second is not None)
    if generate.looping == "drop":
        return Rejected("looping", f"repeats itself from its token {second}")
    return Judged(second, truncated=truncated, looping=True)


def row(
    prompt: dict[str, Any],
    *,
    input_ids: Sequence[int],
    response: Sequence[int],
    finish_reason: str,
    looping: bool,
) -> dict[str, Any]:
    """A row of contracts.CONVERSATIONS: only the response's tokens carry loss.

    A capped response is cut off: the tokens after the cap carry no loss, and no token before them
    sees them, so nothing would read their states.
    """
    return {
        "id": prompt["id"],
        "domain": prompt["domain"],
        "split": prompt["split"],
        "input_ids": [*input_ids, *response],
        "loss_mask": [False] * len(input_ids) + [True] * len(response),
        "finish_reason": finish_reason,
        "looping": looping,
    }
