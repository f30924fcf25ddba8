"""Finds responses that repeat themselves: greedy decoding of a small model loops often, and loops
make acceptance look better than it is. One rule for the data (generate.looping) and for what is
reported without looping responses."""

from __future__ import annotations

from collections.abc import Sequence


def loop_start(tokens: Sequence[int], *, ngram: int, repeats: int) -> int | None:
    """Index at which a loop's second turn begins, or None where nothing loops.

    A response loops when one n-gram of `ngram` tokens occurs at least `repeats` times, occurrences
    that overlap an earlier one not counted (a ruled line is no loop). Of several such n-grams the
    one whose second occurrence is earliest decides. Linear time.
    """
    occurrences: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(tokens) - ngram + 1):
        found = occurrences.setdefault(tuple(tokens[start : start + ngram]), [])
        if not found or start >= found[-1] + ngram:
            found.append(start)
    return min((found[1] for found in occurrences.values() if len(found) >= repeats), default=None)
