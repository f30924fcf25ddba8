"""Other people's data: what is taken, what is rejected and why, and how it is split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.prepare import datasets_source, files
from stages.prepare.conversations import RejectedRow, candidates, parse_row
from stages.prepare.prompt import Candidates, below
from stages.sources import DatasetSource, FileSource

ROLE_MAP = {"human": "user", "gpt": "assistant"}


def turn(role: str, content: Any = "text") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_conversation_is_cut_after_its_last_user_turn_and_keeps_its_history() -> None:
    turns = [turn("system"), turn("user", "1"), turn("assistant", "2"), turn("user", "3")]
    messages, _ = parse_row({"messages": [*turns, turn("assistant", "4")]}, role_map={})
    assert messages == turns


def test_foreign_role_names_are_mapped() -> None:
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    assert parse_row(row, role_map=ROLE_MAP)[0] == [turn("user", "Hi")]


def test_tool_calls_and_reasoning_stay_in_the_history() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None}
    answer = {"role": "tool", "content": "7", "tool_call_id": "1"}
    thought = {"role": "assistant", "content": "7", "reasoning": "hm"}
    tools = [{"type": "function"}]
    row = {
        "messages": [turn("user"), call, answer, thought, turn("user")],
        "tools": json.dumps(tools),
    }
    messages, found = parse_row(row, role_map={})
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert messages[2:4] == [answer, thought]
    assert found == tools


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (["a"], "not_an_object"),
        ({"text": "a"}, "unknown_shape"),
        ({"messages": "a"}, "unknown_shape"),
        ({"messages": [{"content": "a"}]}, "unknown_shape"),
        ({"messages": [turn("user"), turn("bard"), turn("user")]}, "unknown_role"),
        ({"messages": [turn("system")]}, "no_user_turn"),
        ({"messages": [turn("user", [{"type": "image"}])]}, "content_not_text"),
        ({"messages": [turn("user", None)]}, "content_not_text"),
        ({"prompt": "  "}, "empty_prompt"),
        ({"prompt": "a", "tools": "{"}, "bad_tools"),
        ({"prompt": "a", "tools": ["a"]}, "bad_tools"),
    ],
)
def test_a_row_that_is_no_prompt_is_rejected_with_a_reason(row: Any, reason: str) -> None:
    with pytest.raises(RejectedRow) as caught:
        parse_row(row, role_map={})
    assert caught.value.reason == reason


def load_file(path: Path, use: str = "train") -> Candidates:
    source = FileSource.model_validate(
        {"kind": "file", "path": str(path), "domain": "qa", "use": use}
    )
    return files.load(source, seed=1, role_map=ROLE_MAP)


def test_bad_lines_of_a_file_go_to_the_ledger_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        b'{"prompt": "one"}', b"{oops", b"", b'{"messages": [{"role": "bard", "content": "x"}]}',
        b'{"prompt": "\xff"}', '{"prompt": "zwölf"}'.encode(),
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    found = load_file(path)
    assert sorted(p.messages[0]["content"] for p in found.train) == ["one", "zwölf"]
    assert [(r["id"], r["reason"]) for r in found.rejects] == [
        ("mine.jsonl:2", "not_json"),
        ("mine.jsonl:4", "unknown_role"),
        ("mine.jsonl:5", "not_json"),
    ]
    assert found.num_rows == 5


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [
        {"messages": [turn("user", f"question {i}"), turn("assistant"), turn("user", "and?")]}
        for i in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = [
        ([p.id for p in found.evaluation], [p.id for p in found.train])
        for found in (
            load_file(tmp_path / f"a.{suffix}", "both") for suffix in ("parquet", "jsonl")
        )
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("name", "message"), [("missing.jsonl", "no such file"), ("a.csv", "expected .jsonl")]
)
def test_a_file_that_cannot_be_a_source_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=message):
        load_file(tmp_path / name)


@given(
    texts=st.lists(st.text(min_size=1).filter(str.strip), unique=True, max_size=30),
    extra=st.lists(st.text(min_size=1).filter(str.strip), max_size=10),
)
def test_rows_that_are_added_move_no_row_to_the_other_side(
    texts: list[str], extra: list[str]
) -> None:
    def split(rows: list[str]) -> tuple[set[str], set[str]]:
        found = candidates(
            [(str(i), {"prompt": text}) for i, text in enumerate(rows)],
            domain="qa", use="both", seed=1, role_map={},
        )  # fmt: skip
        return {p.id for p in found.evaluation}, {p.id for p in found.train}

    evaluation, train = split(texts)
    more_evaluation, more_train = split([*extra, *texts])
    assert evaluation <= more_evaluation
    assert train <= more_train
    assert not more_evaluation & more_train


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_the_split_boundary_only_moves_up(text: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert not below(text, low) or below(text, high)
    assert not below(text, 0.0)
    assert below(text, 1.0)


def test_a_local_dataset_folder_is_a_source_offline(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    rows = [{"conversations": [{"from": "human", "value": f"q {i}"}], "n": i} for i in range(6)]
    rows[2]["conversations"] = [{"from": "bard", "value": "x"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(**changes: Any) -> Candidates:
        values = {"kind": "dataset", "id": str(folder), "domain": "qa", "split": "train"}
        source = DatasetSource.model_validate({**values, "use": "train", **changes})
        return datasets_source.load(source, seed=1, role_map=ROLE_MAP)

    found = load()
    assert sorted(p.messages[0]["content"] for p in found.train) == [
        "q 0",
        "q 1",
        "q 3",
        "q 4",
        "q 5",
    ]
    assert [(r["id"], r["reason"]) for r in found.rejects] == [(f"{folder}:2", "unknown_role")]
    assert load(messages_column="conversations", limit=2).num_rows == 2
    with pytest.raises(ValueError, match=r"no column 'text'; it has \['conversations', 'n'\]"):
        load(prompt_column="text")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(split="nothing")
    # The same path with another content is read afresh.
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "new"}) + "\n")
    assert [p.messages[0]["content"] for p in load().train] == ["new"]
