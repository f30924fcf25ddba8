"""Rows of other people's data as prompts: the shapes that are accepted, and why one is not.

Accepted: {"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]} and
{"prompt": "..."}; "tools" (a list, or JSON of one) may stand beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from stages.prepare.prompt import (
    EVALUATION_SHARE,
    Candidates,
    Message,
    Prompt,
    below,
    hash_order,
    reject,
)

ROLES = ("system", "developer", "user", "assistant", "tool")


class RejectedRow(ValueError):
    """A row that is no prompt: `reason` is counted, the message is its detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def parse_row(row: Any, *, role_map: Mapping[str, str]) -> tuple[list[Message], list[Any]]:
    """Messages up to the last user turn, and tools, of one row.

    Assistant turns before the last user turn stay as history; what follows it is left out, since
    responses are always the target's own. Raises RejectedRow.
    """
    if not isinstance(row, Mapping):
        raise RejectedRow("not_an_object", f"expected a JSON object, found {type(row).__name__}")
    if row.get("messages") is not None:
        turns, role_key, text_key = row["messages"], "role", "content"
    elif row.get("conversations") is not None:
        turns, role_key, text_key = row["conversations"], "from", "value"
    elif isinstance(row.get("prompt"), str):
        turns, role_key, text_key = [{"role": "user", "content": row["prompt"]}], "role", "content"
    else:
        raise RejectedRow(
            "unknown_shape",
            f"expected messages, conversations or prompt (text), found keys {sorted(row)}",
        )
    if not isinstance(turns, list | tuple):
        raise RejectedRow("unknown_shape", f"turns are {type(turns).__name__}, expected a list")
    messages = [_message(turn, role_key, text_key, role_map) for turn in turns]
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise RejectedRow("no_user_turn", f"roles are {[m['role'] for m in messages]}")
    messages = messages[: users[-1] + 1]
    if not messages[-1]["content"].strip():
        raise RejectedRow("empty_prompt", "the last user turn has no text")
    return messages, _tools(row.get("tools"))


def _message(turn: Any, role_key: str, text_key: str, role_map: Mapping[str, str]) -> Message:
    if not isinstance(turn, Mapping) or role_key not in turn:
        raise RejectedRow("unknown_shape", f"a turn without {role_key!r}: {str(turn)[:80]}")
    role = role_map.get(turn[role_key], turn[role_key])
    if role not in ROLES:
        raise RejectedRow(
            "unknown_role",
            f"role {role!r}; name it in prepare.role_map, or use one of {', '.join(ROLES)}",
        )
    # Parquet gives every struct all keys; those without a value are not part of the turn.
    rest = {
        key: value
        for key, value in turn.items()
        if key not in (role_key, text_key) and value is not None
    }
    text = turn.get(text_key)
    if text is None and role == "assistant" and rest.get("tool_calls"):
        text = ""
    if not isinstance(text, str):
        raise RejectedRow(
            "content_not_text", f"{role} content is {type(text).__name__}, expected text"
        )
    return {"role": role, "content": text, **rest}


def _tools(value: Any) -> list[Any]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RejectedRow("bad_tools", f"tools are not JSON: {error}") from None
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise RejectedRow("bad_tools", "expected a list of tool schemas")
    return [dict(tool) for tool in value]


def candidates(
    rows: Iterable[tuple[str, Any]],
    *,
    domain: str,
    use: str,
    seed: int,
    role_map: Mapping[str, str],
) -> Candidates:
    """Sorts named rows (where, row) into evaluation and training candidates.

    With use "both" a hash of the content decides, so adding rows moves no row to the other side.
    A RejectedRow given as the row (it could not even be read) goes to the ledger as it is.
    """
    result = Candidates(domain=domain)
    evaluation: list[Prompt] = []
    train: list[Prompt] = []
    for where, row in rows:
        result.num_rows += 1
        try:
            if isinstance(row, RejectedRow):
                raise row
            messages, tools = parse_row(row, role_map=role_map)
        except RejectedRow as error:
            result.rejects.append(reject(where, error.reason, str(error)))
            continue
        prompt = Prompt(domain=domain, messages=tuple(messages), tools=tuple(tools), source=where)
        apart = use == "evaluation" or (use == "both" and below(prompt.id, EVALUATION_SHARE))
        (evaluation if apart else train).append(prompt)
    result.evaluation = hash_order(evaluation, salt="evaluation", key=lambda prompt: prompt.id)
    result.train = hash_order(train, salt=f"train/{seed}", key=lambda prompt: prompt.id)
    return result
