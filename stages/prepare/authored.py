"""The project's own prompts: evaluation written one by one, training made from templates.

data/authored/<domain>.yaml holds
  evaluation: texts, used as they stand; they share no wording with the templates
  templates:  texts with placeholders, for training
  banks:      name: values that placeholders draw from (shared.yaml holds banks for all domains)

Placeholders of a template, each drawn once a prompt:
  {bank}      a value of the bank; {bank.2} is another, different value of it
  {bank:key}  a field of a bank value that is a mapping; the same value for every key
  {n=3..12}   a whole number, {n=10..90/5} in steps; {n} repeats it
  [a|b|]      one of the alternatives
`a` before a placeholder becomes `an` where it must, and sentences begin with a capital.
A value may hold placeholders of its own. A list in a field yields one of its items; {topic:facts*5}
yields the first, which says what the others speak of, and four more in their order.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from stages.prepare.overlap import near_duplicate_key
from stages.prepare.prompt import Candidates, Prompt, hash_order, user_prompt
from stages.sources import AuthoredSource

PLACEHOLDER = re.compile(
    r"\{(?P<name>[a-z_]+)(?:\.(?P<other>\d+))?(?::(?P<field>[a-z_]+)(?:\*(?P<take>\d+))?)?"
    r"(?:=(?P<low>\d+)\.\.(?P<high>\d+)(?:/(?P<step>\d+))?)?\}"
)
ARTICLE = re.compile(r"\b([Aa]) (?=[{\[])")
VOWEL = re.compile(r"\0(?=(?!one\b|once\b|eu|uni)[aeiou])", re.IGNORECASE)
SENTENCE = re.compile(r"(^|[.!?]\s+)([a-z])")
ALTERNATIVES = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
SHARED = "shared.yaml"
MAX_REPEATS = 200  # draws in a row without a new prompt: the templates are used up
MAX_DEPTH = 8


def load(source: AuthoredSource, *, folder: Path, seed: int) -> list[Candidates]:
    """Candidates for each domain of the source. Raises ValueError for material that is missing
    or does not parse; the message names the file."""
    shared = _read(folder / SHARED).get("banks", {})
    result = []
    for domain in source.domains:
        body = _read(folder / f"{domain}.yaml")
        texts = body.get("evaluation", [])
        evaluation = [
            user_prompt(domain, text.strip(), source=f"authored:evaluation-{index}")
            for index, text in enumerate(texts)
        ]
        train: Iterator[Prompt] = _train(
            domain, body.get("templates", []), {**shared, **body.get("banks", {})}, seed=seed
        )
        result.append(
            Candidates(
                domain=domain,
                evaluation=hash_order(evaluation, salt="evaluation", key=lambda p: p.id),
                train=train,
            )
        )
    return result


def _train(
    domain: str, templates: list[str], banks: dict[str, list[Any]], *, seed: int
) -> Iterator[Prompt]:
    """Distinct prompts, the templates in turn (each round in another order), until none is new."""
    draw = random.Random(f"{seed}/authored/{domain}")
    seen: set[str] = set()
    repeats = 0
    while templates and repeats < MAX_REPEATS:
        for index in draw.sample(range(len(templates)), len(templates)):
            text = expand(templates[index], banks, draw)
            prompt = user_prompt(domain, text, source=f"authored:{domain}-{index}")
            key = near_duplicate_key(prompt)
            if key in seen:
                repeats += 1
                continue
            repeats = 0
            seen.add(key)
            yield prompt


def expand(template: str, banks: dict[str, list[Any]], draw: random.Random) -> str:
    """One text of `template`. Raises ValueError for a placeholder that nothing defines."""
    drawn: dict[str, Any] = {}
    text = template
    for _ in range(MAX_DEPTH):
        before = text
        text = ARTICLE.sub("\\1\0", text)  # the word that follows is not known yet
        text = ALTERNATIVES.sub(lambda match: draw.choice(match[1].split("|")), text)
        text = PLACEHOLDER.sub(partial(_fill, banks=banks, draw=draw, drawn=drawn), text)
        if text == before:
            break
    if "{" in text or "[" in text:
        raise ValueError(f"template is not filled: {text[:120]!r} (of {template[:60]!r})")
    text = VOWEL.sub("n ", text).replace("\0", " ")
    text = SENTENCE.sub(lambda match: match[1] + match[2].upper(), text)
    return re.sub(r"[ \t]+$", "", re.sub(r"(?<=\S)[ \t]{2,}(?=\S)", " ", text), flags=re.M).strip()


def _fill(
    match: re.Match[str],
    *,
    banks: dict[str, list[Any]],
    draw: random.Random,
    drawn: dict[str, Any],
) -> str:
    name, other, field = match["name"], match["other"] or "1", match["field"]
    if match["low"] is not None:
        low, high, step = int(match["low"]), int(match["high"]), int(match["step"] or 1)
        drawn[name] = draw.randrange(low, high + 1, step)
    if name in drawn:
        return str(drawn[name])
    if name not in banks:
        raise ValueError(f"placeholder {match[0]} names no bank; banks are {sorted(banks)}")
    key = f"{name}.{other}"
    if key not in drawn:
        taken = [value for known, value in drawn.items() if known.startswith(f"{name}.")]
        drawn[key] = draw.choice([value for value in banks[name] if value not in taken])
    value = drawn[key]
    if field is None:
        return str(value)
    if field not in value:
        raise ValueError(f"placeholder {match[0]}: no {field!r} in {str(value)[:80]}")
    return _field(value[field], take=int(match["take"] or 1), draw=draw)


def _field(value: Any, *, take: int, draw: random.Random) -> str:
    if not isinstance(value, list):
        return str(value)
    if take == 1:
        return str(draw.choice(value))
    others = draw.sample(range(1, len(value)), min(take, len(value)) - 1)
    return " ".join(str(value[index]) for index in (0, *sorted(others)))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; the authored source needs it for its domain")
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"{path}: expected a mapping of evaluation, templates and banks")
    return body
