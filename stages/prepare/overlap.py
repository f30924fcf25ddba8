"""The overlap rule: no training prompt shares a word n-gram with an evaluation prompt.

Words are lower-cased runs of letters and digits, so punctuation and layout do not hide a copy.
Listed boilerplate (task instructions) is cut out first, and no n-gram reaches across the cut.
A last user turn of fewer than n words counts as one gram of its own, so that a short question
cannot be in both. Tool schemas are compared by their descriptions, not by their JSON punctuation.

Cost: one set look-up a word; 1,100 prompts against 108 take well under a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stages.prepare.prompt import Prompt

WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Lower-cased words without punctuation."""
    return WORD.findall(text.lower())


def without_boilerplate(text: str, boilerplate: Sequence[Sequence[str]]) -> list[list[str]]:
    """The words of `text`, in pieces: what is left between boilerplate phrases (longest first)."""
    tokens = words(text)
    phrases = sorted((list(p) for p in boilerplate if p), key=len, reverse=True)
    pieces: list[list[str]] = [[]]
    position = 0
    while position < len(tokens):
        for phrase in phrases:
            if tokens[position : position + len(phrase)] == phrase:
                pieces.append([])
                position += len(phrase)
                break
        else:
            pieces[-1].append(tokens[position])
            position += 1
    return [piece for piece in pieces if piece]


def ngrams(tokens: Sequence[str], n: int) -> Iterator[str]:
    """Every window of n words, as one string; nothing for fewer than n."""
    for start in range(len(tokens) - n + 1):
        yield " ".join(tokens[start : start + n])


def prompt_ngrams(prompt: Prompt, *, n: int, boilerplate: Sequence[Sequence[str]]) -> set[str]:
    """The grams by which `prompt` is compared with others."""
    texts = [text for message in prompt.messages for text in _strings(message.get("content"))]
    found: set[str] = set()
    for text in [*texts, *_strings(list(prompt.tools))]:
        for piece in without_boilerplate(text, boilerplate):
            found.update(ngrams(piece, n))
    last = without_boilerplate(str(prompt.messages[-1].get("content")), boilerplate)
    short = [word for piece in last for word in piece]
    if 0 < len(short) < n:
        found.add(" ".join(short))
    return found


def _strings(value: Any) -> Iterator[str]:
    """Every string inside a JSON value (keys apart)."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


class OverlapIndex:
    """The evaluation prompts' grams."""

    def __init__(self, evaluation: Iterable[Prompt], *, n: int, boilerplate: Sequence[str]) -> None:
        self.n = n
        self.boilerplate = [words(phrase) for phrase in boilerplate]
        self.grams: dict[str, str] = {}
        for prompt in evaluation:
            for gram in prompt_ngrams(prompt, n=n, boilerplate=self.boilerplate):
                self.grams.setdefault(gram, prompt.id)

    def shared(self, prompt: Prompt) -> str | None:
        """A gram that `prompt` shares with an evaluation prompt, or None.

        The first in the alphabet, so that the ledger does not depend on the order of a set.
        """
        found = prompt_ngrams(prompt, n=self.n, boilerplate=self.boilerplate) & self.grams.keys()
        return min(found) if found else None


def near_duplicate_key(prompt: Prompt) -> str:
    """Equal for prompts that differ in case, punctuation, layout and figures alone."""
    texts = [text for message in prompt.messages for text in _strings(message.get("content"))]
    tokens = [word for text in [*texts, *_strings(list(prompt.tools))] for word in words(text)]
    return " ".join("0" if word.isdigit() else word for word in tokens)
