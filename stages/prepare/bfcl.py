"""Function-calling prompts with JSON schemas, from the package bfcl-eval (Apache-2.0).

Split by the name of the first function, so that no evaluation prompt's function is trained on under
another question. Only short rows: their schemas must fit beside the instructions that templates
add to tools.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from stages.prepare.overlap import ngrams, words
from stages.prepare.prompt import Candidates, Prompt, below, hash_order
from stages.sources import BfclSource

FILES = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
EVALUATION_SHARE = 0.4  # of the functions; few of their rows are short and unlike each other
MAX_EVALUATION_CHARACTERS = 700  # fits 320 tokens with the instructions that templates add
MAX_TRAIN_CHARACTERS = 1200
ALIKE_WORDS = 4  # evaluation rows that share so many words in a row are variants of one task


def load(source: BfclSource, *, seed: int) -> Candidates:
    """Single-turn rows that consist of user turns and at least one function."""
    evaluation: list[Prompt] = []
    train: list[Prompt] = []
    evaluation_names: set[str] = set()
    for identity, messages, functions in _rows():
        tools = tuple(openai_tool(function) for function in functions)
        prompt = Prompt(
            domain=source.domain, messages=messages, tools=tools, source=f"bfcl:{identity}"
        )
        size = len(json.dumps(prompt.content))
        if below(_names(prompt)[0], EVALUATION_SHARE):
            evaluation_names.update(_names(prompt))
            if size <= MAX_EVALUATION_CHARACTERS:
                evaluation.append(prompt)
        elif size <= MAX_TRAIN_CHARACTERS:
            train.append(prompt)
    train = [prompt for prompt in train if evaluation_names.isdisjoint(_names(prompt))]

    def key(prompt: Prompt) -> str:
        return prompt.source

    return Candidates(
        domain=source.domain,
        evaluation=_unlike(hash_order(evaluation, salt="evaluation", key=key)),
        train=hash_order(train, salt=f"train/{seed}", key=key),
        num_rows=len(evaluation) + len(train),
    )


def _unlike(prompts: list[Prompt]) -> list[Prompt]:
    """The first prompt of each task: a dozen functions compute a greatest common divisor."""
    seen: set[str] = set()
    kept = []
    for prompt in prompts:
        texts = [message["content"] for message in prompt.messages]
        texts += [tool["function"]["description"] for tool in prompt.tools]
        grams = {gram for text in texts for gram in ngrams(words(text), ALIKE_WORDS)}
        if seen.isdisjoint(grams):
            seen |= grams
            kept.append(prompt)
    return kept


def openai_tool(function: dict[str, Any]) -> dict[str, Any]:
    """A BFCL function as an OpenAI tool: JSON-schema types, and a name without dots."""
    return {
        "type": "function",
        "function": {
            "name": function["name"].replace(".", "_"),
            "description": function["description"],
            "parameters": _schema(function["parameters"]),
        },
    }


def _schema(value: Any) -> Any:
    """JSON schema of BFCL's own types; "any" is the absence of a type."""
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        if key == "type" and isinstance(item, str):
            kind = TYPES.get(item, item)
            if kind is not None:
                result[key] = kind
        elif key != "optional" or isinstance(item, dict):
            result[key] = _schema(item)
    return result


def _names(prompt: Prompt) -> list[str]:
    return [tool["function"]["name"] for tool in prompt.tools]


def _rows() -> list[tuple[str, tuple[dict[str, Any], ...], list[dict[str, Any]]]]:
    spec = importlib.util.find_spec("bfcl_eval")
    folders = [Path(folder) / "data" for folder in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        paths = [folder / f"BFCL_v4_{name}.json" for name in FILES]
        if all(path.is_file() for path in paths):
            return [row for path in paths for row in _read(path)]
    raise ValueError(
        "prepare.sources: bfcl needs the data files of the package bfcl-eval; install "
        f"requirements/data.txt, or name another source (looked in {folders or 'no package'})"
    )


def _read(path: Path) -> list[tuple[str, tuple[dict[str, Any], ...], list[dict[str, Any]]]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            turns = row["question"]
            if len(turns) == 1 and row["function"] and all(m["role"] == "user" for m in turns[0]):
                messages = tuple({"role": "user", "content": m["content"]} for m in turns[0])
                rows.append((row["id"], messages, row["function"]))
    return rows
