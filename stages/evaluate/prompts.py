"""The evaluation prompts as token ids, and why some of them cannot be measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages import contracts
from stages.params import DOMAINS, EvaluateParams
from stages.serving.chat import Renderer, RenderError


@dataclass(frozen=True)
class Prompt:
    id: str
    domain: str
    token_ids: list[int]


def room(*, max_model_len: int, max_tokens: int, block_size: int) -> int:
    """Longest prompt that can be measured, in tokens.

    vLLM drafts nothing for the whole batch, and counts zeros as drafts, once any sequence is within
    block_size + 1 of max_model_len; so no sequence may get there.
    """
    longest = max_model_len - max_tokens - block_size - 1
    if longest < 1:
        raise ValueError(
            f"engine.max_model_len={max_model_len} leaves no room for a prompt beside "
            f"evaluate.max_tokens={max_tokens} and a block of {block_size}; raise the former"
        )
    return longest


def read_prompts(
    folder: Path,
    *,
    target: Path,
    evaluate: EvaluateParams,
    chat_template_kwargs: Mapping[str, Any],
    longest: int,
) -> tuple[list[Prompt], list[dict[str, str]]]:
    """The first prompts of each evaluation set in the order of DOMAINS, and the rejected ones.

    Raises ValueError for a domain without a single prompt that can be measured.
    """
    renderer = Renderer(target)
    prompts: list[Prompt] = []
    rejects: list[dict[str, str]] = []
    for domain in DOMAINS:
        rows = contracts.read_table(folder / f"evaluation-{domain}.parquet", contracts.PROMPTS)
        kept = len(prompts)
        for row in rows[: evaluate.prompts_per_domain]:
            try:
                ids = renderer.render(
                    json.loads(row["messages"]),
                    tools=json.loads(row["tools"]) if row["tools"] else (),
                    chat_template_kwargs=chat_template_kwargs,
                )
            except RenderError as error:
                rejects.append(
                    {"id": row["id"], "reason": "template_refused", "detail": str(error)}
                )
                continue
            if len(ids) > longest:
                detail = f"{len(ids)} tokens; at most {longest} leave room for response and block"
                rejects.append({"id": row["id"], "reason": "too_long", "detail": detail})
                continue
            prompts.append(Prompt(row["id"], domain, ids))
        if len(prompts) == kept:
            raise ValueError(
                f"evaluate: no prompt of {folder}/evaluation-{domain}.parquet can be measured "
                f"({len(rows)} in the file, at most {longest} tokens allowed): {rejects[-3:]}"
            )
    return prompts, rejects


def first_of_each(prompts: list[Prompt], *, limit: int) -> list[Prompt]:
    """The first `limit` prompts of each domain, in the same order."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if taken[prompt.domain] <= limit:
            chosen.append(prompt)
    return chosen


def spread(prompts: list[Prompt], *, count: int) -> list[Prompt]:
    """`count` prompts over the domains: the first of each, then the second of each, and so on."""
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    deepest = max(map(len, by_domain.values()), default=0)
    turns = [
        group[turn] for turn in range(deepest) for group in by_domain.values() if turn < len(group)
    ]
    return turns[:count]
