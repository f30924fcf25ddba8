"""Prompts of a folder, and which of them are held out. Pure but for reading the files.

One JSONL file is one set, named after the file; rows are {"messages": [...]} (prepare's shapes). A
set's prompts are ordered by a hash of their content; the first ones are the test prompts. So the
split depends on nothing but the content, and every set is on both sides.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench.quality.settings import SplitSettings
from stages import contracts
from stages.prepare import files
from stages.prepare.prompt import Prompt
from stages.sources import FileSource

Refusal = str | None  # why the target cannot take a prompt


@dataclass(kw_only=True)
class Split:
    """Prompts by set; `left_out` counts those that are in neither half, by reason."""

    train: dict[str, list[Prompt]] = field(default_factory=dict)
    test: dict[str, list[Prompt]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)


def set_files(folder: Path) -> list[Path]:
    """The folder's JSONL files. Raises ValueError where there is none."""
    found = sorted(folder.glob("*.jsonl"))
    if not found:
        state = "holds no *.jsonl file" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"PROMPTS={folder} {state}; expected one JSONL file a set, with rows that have messages"
        )
    return found


def content_fingerprint(folder: Path) -> str:
    """Of the sets' names and bytes; not of where they lie."""
    return contracts.fingerprint(
        {path.stem: contracts.file_sha256(path) for path in set_files(folder)}
    )


def read_sets(folder: Path) -> tuple[dict[str, list[Prompt]], Counter[str]]:
    """Every set's prompts, and the rows that are none, by reason."""
    sets: dict[str, list[Prompt]] = {}
    rejected: Counter[str] = Counter()
    for path in set_files(folder):
        source = FileSource(kind="file", path=str(path), domain=path.stem, use="train")
        candidates = files.load(source, seed=0, role_map={})
        sets[path.stem] = list(candidates.train)
        rejected.update(reject["reason"] for reject in candidates.rejects)
    return sets, rejected


def split_sets(
    sets: dict[str, list[Prompt]], *, settings: SplitSettings, refuse: Callable[[Prompt], Refusal]
) -> Split:
    """Raises ValueError for a set with fewer than two usable prompts."""
    split = Split()
    seen: set[str] = set()
    for name in sorted(sets):
        usable = []
        for prompt in _ordered(sets[name], salt=settings.salt):
            content = contracts.fingerprint(prompt.content)
            reason = "duplicate" if content in seen else refuse(prompt)
            seen.add(content)
            if reason is None:
                usable.append(prompt)
            else:
                split.left_out[reason] += 1
        if len(usable) < 2:
            raise ValueError(
                f"set {name}: {len(usable)} of its {len(sets[name])} prompts can be used, at least "
                f"two are needed (left out: {dict(split.left_out)})"
            )
        number = num_test_prompts(len(usable), settings=settings)
        split.test[name], split.train[name] = usable[:number], usable[number:]
    return split


def num_test_prompts(number: int, *, settings: SplitSettings) -> int:
    """How many of a set's prompts are held out: the fraction, or the minimum where half of the set
    allows it."""
    wanted = max(round(settings.test_fraction * number), settings.min_test_prompts)
    return min(wanted, number // 2)


def _ordered(prompts: Iterable[Prompt], *, salt: str) -> list[Prompt]:
    def key(prompt: Prompt) -> bytes:
        content = contracts.canonical_json(prompt.content)
        return hashlib.sha256(f"{salt}/{content}".encode()).digest()

    return sorted(prompts, key=key)
