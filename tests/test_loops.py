"""Loop detection against a slow reference that follows the definition word by word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.loops import loop_start


def reference(tokens: list[int], ngram: int, repeats: int) -> int | None:
    starts = range(len(tokens) - ngram + 1)
    seconds = []
    for first in starts:
        gram = tokens[first : first + ngram]
        taken: list[int] = []
        for start in starts:
            if tokens[start : start + ngram] == gram and (not taken or start - taken[-1] >= ngram):
                taken.append(start)
        if len(taken) >= repeats:
            seconds.append(taken[1])
    return min(seconds) if seconds else None


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5), st.integers(2, 4))
def test_it_follows_the_definition(tokens: list[int], ngram: int, repeats: int) -> None:
    assert loop_start(tokens, ngram=ngram, repeats=repeats) == reference(tokens, ngram, repeats)


@given(st.lists(st.integers(0, 1000), unique=True, min_size=8, max_size=20), st.integers(3, 6))
def test_a_phrase_said_again_and_again_loops_from_its_second_turn(
    phrase: list[int], turns: int
) -> None:
    assert loop_start(phrase * turns, ngram=8, repeats=3) == len(phrase)


@given(st.lists(st.integers(), unique=True, max_size=100))
def test_a_response_without_repetition_does_not_loop(tokens: list[int]) -> None:
    assert loop_start(tokens, ngram=1, repeats=2) is None


def test_a_ruled_line_is_no_loop() -> None:
    assert loop_start([7] * 20, ngram=8, repeats=3) is None
    assert loop_start([7] * 24, ngram=8, repeats=3) == 8
