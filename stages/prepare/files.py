"""Prompts from a local JSONL or Parquet file of conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.prepare import conversations
from stages.prepare.conversations import RejectedRow
from stages.prepare.prompt import Candidates
from stages.sources import FileSource


def load(source: FileSource, *, seed: int, role_map: Mapping[str, str]) -> Candidates:
    """The file's prompts. Raises ValueError for a missing, unreadable or foreign file."""
    path = Path(source.path).expanduser()
    if not path.is_file():
        raise ValueError(
            f"prepare.sources: {source.path}: no such file (a folder is a dataset source)"
        )
    if path.suffix in {".jsonl", ".json"}:
        rows = _jsonl(path)
    elif path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        raise ValueError(f"prepare.sources: {path}: expected .jsonl or .parquet")
    return conversations.candidates(
        rows, domain=source.domain, use=source.use, seed=seed, role_map=role_map
    )


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path.name}:{number}"
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line.decode())
            except ValueError as error:
                row = RejectedRow("not_json", str(error))
            yield where, row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"prepare.sources: {path}: not a Parquet file: {error}") from None
    number = 0
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path.name}:{number}", row
