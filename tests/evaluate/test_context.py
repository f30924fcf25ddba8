"""Prompts of given lengths: never longer than their bucket, made of whole documents or of both ends
of a long text, and nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.evaluate import context
from stages.evaluate.context import Text


def render(text: str) -> list[int]:
    """A template of three tokens around a token a word."""
    return [1, 2, *(hash(word) % 1000 for word in text.split()), 3]


DOCUMENTS = [f"{letter}{letter} " * (40 - n) for n, letter in enumerate("abcdefgh")]


@given(st.integers(40, 400), st.integers(1, 4))
def test_a_prompt_fills_its_bucket_to_the_word(bound: int, number: int) -> None:
    available = sum(len(text.split()) for text in DOCUMENTS)
    for text in context.authored(DOCUMENTS, bound=bound, number=number):
        ids = context.fit(text, bound=bound, render=render)
        assert ids is not None
        assert len(ids) <= bound
        if available > bound:
            assert len(ids) >= bound - 1


def test_prompts_of_a_bucket_begin_with_documents_of_their_own() -> None:
    texts = context.authored(DOCUMENTS, bound=100, number=3)
    starts = [text.cut(40).splitlines()[1][:2] for text in texts]
    assert starts == ["aa", "bb", "cc"]
    questions = [text.cut(0) for text in texts]
    assert len(set(questions)) == 3
    whole = texts[0].cut(texts[0].length)
    assert all(f"{letter}{letter}" in whole for letter in "abcdefgh")


def items(*lengths: int) -> list[dict[str, str]]:
    return [
        {
            "context": " ".join(f"w{i}" for i in range(length)),
            "question": "Which?",
            **{f"choice_{letter}": f"choice {letter}" for letter in "ABCD"},
            "answer": "A",
        }
        for length in lengths
    ]


def test_the_middle_of_a_long_text_is_left_out() -> None:
    (text,) = context.longbench(items(500), bound=100, number=1)
    ids = context.fit(text, bound=100, render=render)
    assert ids is not None
    assert 98 <= len(ids) <= 100
    kept = text.cut(200)
    assert kept.startswith("w0 w1 ")
    assert "w499\n\nQuestion" in kept
    assert "w250" not in kept
    assert all(f"({letter}) choice {letter}" in kept for letter in "ABCD")
    (short,) = context.longbench(items(80), bound=200, number=1)
    assert "w39 w40 w41" in short.cut(short.length)


def test_texts_are_taken_by_length_and_the_longest_where_none_is_long_enough(
    tmp_path: Path,
) -> None:
    path = tmp_path / "longbench.json"
    path.write_text(json.dumps(items(2000, 20, 900, 100)))
    sorted_items = context.read_longbench(path)
    assert [len(item["context"].split()) for item in sorted_items] == [20, 100, 900, 2000]

    def words(bound: int, number: int) -> list[int]:
        texts = context.longbench(sorted_items, bound=bound, number=number)
        lasts = [text.cut(text.length).split("\n\n")[0].split()[-1] for text in texts]
        return [int(last[1:]) + 1 for last in lasts]

    assert words(90, 2) == [100, 900]
    assert words(800, 2) == [900, 2000]
    assert words(10**6, 1) == [2000]
    assert words(10**6, 9) == [20, 100, 900, 2000]


def test_another_kind_of_file_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "longbench.json"
    for body in ("{", "{}", "[]"):
        path.write_text(body)
        with pytest.raises(ValueError, match=r"evaluate\.longbench: .*longbench\.json"):
            context.read_longbench(path)
    path.write_text(json.dumps([{"context": "x"}]))
    with pytest.raises(ValueError, match=r"item 0 has no .*question"):
        context.read_longbench(path)


def test_lengths_beyond_the_limit_are_lowered_to_it_once() -> None:
    assert context.buckets([128, 512, 2048, 8192], longest=1000) == [128, 512, 1000]
    assert context.buckets([128, 512], longest=4000) == [128, 512]


def test_a_bucket_without_texts_is_noted_and_not_filled_with_shorter_ones() -> None:
    def texts(_: int) -> list[Text]:
        return context.authored(DOCUMENTS[:2], bound=1000, number=2)

    prompts, notes = context.make_prompts(texts, bounds=[5, 60, 120, 900], render=render)
    assert [prompt.id for prompt in prompts] == [
        *("context-60-0", "context-60-1", "context-120-0", "context-120-1")
    ]
    assert {prompt.domain for prompt in prompts} == {"60", "120"}
    assert [note.split()[2] for note in notes] == ["5", "900"]
