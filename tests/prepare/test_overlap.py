"""The overlap rule against a brute-force reading of its definition."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.prepare.overlap import OverlapIndex, near_duplicate_key
from stages.prepare.prompt import user_prompt

TEXT = st.lists(st.sampled_from(["a", "B", "c,", "d.", "e"]), max_size=14).map(" ".join)


def reference(left: str, right: str, n: int, boilerplate: str) -> bool:
    """Do two texts share n words in a row outside the boilerplate? (Strings, no sets, no windows.)

    The boilerplate is cut as it is met from the left. A text of fewer than n words counts whole.
    """

    def pieces(text: str) -> list[str]:
        plain = " ".join(re.sub(r"[^a-z ]", "", text.lower()).split())
        found = [""]
        while plain:
            if boilerplate and (plain + " ").startswith(boilerplate + " "):
                plain = plain[len(boilerplate) :].strip()
                found.append("")
            else:
                word, _, plain = plain.partition(" ")
                found[-1] = f"{found[-1]} {word}".strip()
        return [piece for piece in found if piece]

    def spans(text: str) -> list[str]:
        tokens = text.split()
        return [
            " ".join(tokens[i:j])
            for i in range(len(tokens))
            for j in range(i, len(tokens) + 1)
            if j - i == n
        ]

    long = any(
        span in spans(other)
        for piece in pieces(left)
        for span in spans(piece)
        for other in pieces(right)
    )
    wholes = [" ".join(pieces(text)) for text in (left, right)]
    short = [whole for whole in wholes if 0 < len(whole.split()) < n]
    return long or (len(short) == 2 and short[0] == short[1])


@given(left=TEXT, right=TEXT, n=st.integers(2, 5), boilerplate=st.sampled_from(["", "a b", "c"]))
def test_sharing_agrees_with_brute_force(left: str, right: str, n: int, boilerplate: str) -> None:
    evaluation = user_prompt("qa", left, source="")
    index = OverlapIndex([evaluation], n=n, boilerplate=[boilerplate])
    found = index.shared(user_prompt("qa", right, source=""))
    assert (found is not None) == reference(left, right, n, boilerplate)


@pytest.mark.parametrize(
    ("training", "shared"),
    [
        ("He said: THE QUICK, brown fox jumps -- over the lazy dog!", True),
        ("the quick brown\nfox\njumps over the\nlazy dog", True),
        ("the quick brown fox jumps over a lazy dog", False),
    ],
)
def test_case_punctuation_and_layout_do_not_hide_a_copy(training: str, shared: bool) -> None:
    evaluation = user_prompt("qa", "The quick brown fox jumps over the lazy dog.", source="")
    index = OverlapIndex([evaluation], n=8, boilerplate=[])
    assert (index.shared(user_prompt("qa", training, source="")) is not None) == shared


def test_a_short_question_cannot_be_in_both() -> None:
    index = OverlapIndex([user_prompt("qa", "Who wrote Faust?", source="")], n=8, boilerplate=[])
    assert index.shared(user_prompt("writing", "who wrote faust", source=""))
    assert not index.shared(user_prompt("qa", "Who wrote Faust in 1808?", source=""))


def test_prompts_that_differ_in_figures_and_layout_are_near_duplicates() -> None:
    def key(text: str) -> str:
        return near_duplicate_key(user_prompt("qa", text, source=""))

    assert key("Add 12 and 7.") == key("add 5,\nand 90")
    assert key("Add 12 and 7.") != key("Add 12 to 7.")
