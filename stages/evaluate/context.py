"""Prompts of given lengths, for acceptance and speed against context length.

Long texts come from LongBench-v2 (Bai et al. 2024) where its JSON file is given: a text, a question
and four choices, the middle of the text left out where it is too long, as its authors do. Otherwise
from documents made of this project's own prompts that no drafter was trained on, one after the
other with a question about them at the end.

Cost: rendering a prompt some twenty times, 10 ms each at 8,192 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages import contracts
from stages.evaluate import formulas, results
from stages.evaluate.prompts import Prompt
from stages.params import DOMAINS

AUTHORED, LONGBENCH = "authored", "LongBench-v2"
CHARACTERS_PER_TOKEN = 4  # about; chooses LongBench-v2's texts by length before any is tokenised
MOST_CHARACTERS_PER_TOKEN = 16  # more of a text than this never fits
QUESTIONS = (  # that call for long answers: short ones do not count for speed
    "Write a long letter to a friend that tells them, one by one, what is in the documents.",
    "Explain at length, in your own words and point by point, what the documents above are about.",
    "Write an essay on what the documents above have in common and where they differ.",
    "Write a story in which everything that the documents above speak of occurs.",
)
KEYS = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")

Render = Callable[[str], list[int]]
"""A user's text -> token ids of the rendered conversation."""


@dataclass(frozen=True)
class Text:
    """A prompt that can be made shorter: cut(k) keeps k of its `length` characters."""

    length: int
    cut: Callable[[int], str]


def buckets(lengths: Sequence[int], *, longest: int) -> list[int]:
    """The lengths to measure: what is longer than `longest` is lowered to it, once."""
    return sorted({min(length, longest) for length in lengths})


def read_documents(folder: Path) -> list[str]:
    """The user texts of the evaluation and validation prompts, the longest first."""
    tables = [folder / f"evaluation-{domain}.parquet" for domain in DOMAINS]
    rows = [
        row
        for path in (*tables, folder / f"{contracts.VALIDATION}.parquet")
        if path.is_file()
        for row in contracts.read_table(path, contracts.PROMPTS)
    ]
    last = [json.loads(row["messages"])[-1]["content"] for row in rows]
    texts = dict.fromkeys(text.strip() for text in last if isinstance(text, str))
    return sorted(texts, key=lambda text: (-len(text), text))


def authored(documents: Sequence[str], *, bound: int, number: int) -> list[Text]:
    """`number` prompts for a bucket; each begins with documents of its own, then the others'."""
    texts = []
    for index in range(number):
        dealt = [
            document
            for offset in range(number)
            for document in documents[(index + offset) % number :: number]
        ]
        body = "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(dealt, start=1))
        body = body[: bound * MOST_CHARACTERS_PER_TOKEN]
        question = QUESTIONS[index % len(QUESTIONS)]
        texts.append(Text(len(body), _start(body, question)))
    return texts


def read_longbench(path: Path) -> list[dict[str, str]]:
    """LongBench-v2's items by length of their text. Raises ValueError for another kind of file."""
    try:
        items = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"evaluate.longbench: {path} cannot be read: {error}") from None
    if not isinstance(items, list) or not items:
        raise ValueError(f"evaluate.longbench: {path} holds no list of items")
    for index, item in enumerate(items):
        missing = [key for key in KEYS if not isinstance(item, dict) or key not in item]
        if missing:
            raise ValueError(f"evaluate.longbench: {path}, item {index} has no {missing}")
    return sorted(items, key=lambda item: len(item["context"]))


def longbench(items: Sequence[Mapping[str, str]], *, bound: int, number: int) -> list[Text]:
    """The items whose texts are just long enough for a bucket; the longest where none is."""
    enough = [i for i, x in enumerate(items) if len(x["context"]) >= bound * CHARACTERS_PER_TOKEN]
    first = min(enough[0] if enough else len(items), max(0, len(items) - number))
    texts = []
    for item in items[first : first + number]:
        body = item["context"].strip()
        choices = "\n".join(f"({letter}) {item[f'choice_{letter}'].strip()}" for letter in "ABCD")
        question = (
            f"Question about the text above: {item['question'].strip()}\n{choices}\n\n"
            "Which choice is right? Explain, then end with its letter."
        )
        texts.append(Text(min(len(body), bound * MOST_CHARACTERS_PER_TOKEN), _ends(body, question)))
    return texts


def fit(text: Text, *, bound: int, render: Render) -> list[int] | None:
    """The prompt with as much of the text as `bound` tokens hold; None where not even none fits."""
    low, high = 0, text.length
    best = render(text.cut(0))
    if len(best) > bound:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        ids = render(text.cut(middle))
        if len(ids) <= bound:
            low, best = middle, ids
        else:
            high = middle - 1
    return best


def make_prompts(
    texts: Callable[[int], Iterable[Text]], *, bounds: Sequence[int], render: Render
) -> tuple[list[Prompt], list[str]]:
    """Prompts with their bucket's bound as domain, and notes about buckets that stay empty.

    texts: a bucket's texts, by its bound. A prompt that is no longer than the bucket before is left
    out.
    """
    prompts, notes = [], []
    for before, bound in zip([0, *bounds], bounds, strict=False):
        made = [fit(text, bound=bound, render=render) for text in texts(bound)]
        kept = [ids for ids in made if ids is not None and len(ids) > before]
        prompts += [
            Prompt(f"context-{bound}-{index}", str(bound), ids) for index, ids in enumerate(kept)
        ]
        if not kept:
            notes.append(f"context of {bound} tokens: no text is that long, or short enough")
    return prompts, notes


def rows_by_length(
    rows: Sequence[Mapping[str, Any]], *, prompts: Sequence[Prompt], min_speed_tokens: int
) -> list[dict[str, Any]]:
    """serving.json's `context`, from the journal's rows (measure.measure_speed)."""
    lengths = {prompt.id: len(prompt.token_ids) for prompt in prompts}
    table = []
    for bound in sorted({int(row["domain"]) for row in rows}):
        own = [row for row in rows if row["domain"] == str(bound)]
        rounds = results.response_rounds(row["drafter"] for row in own)
        speed = formulas.domain_speed(map(results.pair, own), min_tokens=min_speed_tokens)
        table.append(
            {
                "prompt_tokens": bound,
                "mean_prompt_tokens": formulas.mean(lengths[row["id"]] for row in own),
                "prompts": len(own),
                "acceptance_length": formulas.acceptance_length(rounds),
                "tokens_per_round": formulas.tokens_per_round(rounds),
                "drafter_tokens_per_s": speed.drafter,
                "baseline_tokens_per_s": speed.baseline,
                "speedup": speed.ratio,
                "drafter_first_token_s": formulas.median(row["drafter"]["first_s"] for row in own),
                "baseline_first_token_s": formulas.median(
                    row["baseline"]["first_s"] for row in own
                ),
            }
        )
    return table


def _start(body: str, question: str) -> Callable[[int], str]:
    return lambda kept: f"{body[:kept].rstrip()}\n\n{question}".strip()


def _ends(body: str, question: str) -> Callable[[int], str]:
    """The first and the last characters of the body; the middle is left out."""

    def cut(kept: int) -> str:
        if kept >= len(body):
            return f"{body}\n\n{question}"
        head = kept - kept // 2
        return f"{body[:head]}{body[len(body) - kept // 2 :]}\n\n{question}".strip()

    return cut
