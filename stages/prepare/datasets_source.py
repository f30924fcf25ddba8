"""Prompts from any Hugging Face dataset id, or a local dataset folder, through `datasets`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.prepare import conversations
from stages.prepare.prompt import Candidates
from stages.sources import DatasetSource

SHAPES = ("messages", "conversations", "prompt")


def load(source: DatasetSource, *, seed: int, role_map: Mapping[str, str]) -> Candidates:
    """The dataset's prompts. Raises ValueError where it cannot be loaded or lacks a column."""
    # A local folder is read afresh: datasets' cache does not notice every change of a file.
    with tempfile.TemporaryDirectory() as folder:
        dataset = _open(source, cache=folder if Path(source.id).is_dir() else None)
        column, shape = _column(source, dataset.column_names)
        return conversations.candidates(
            _rows(source, dataset, column=column, shape=shape),
            domain=source.domain,
            use=source.use,
            seed=seed,
            role_map=role_map,
        )


def _open(source: DatasetSource, *, cache: str | None) -> Any:
    # Imported here: datasets takes a second, which the other sources need not pay.
    import datasets

    name = f"prepare.sources: dataset {source.id!r}"
    try:
        if (Path(source.id) / "dataset_info.json").is_file():
            dataset = datasets.load_from_disk(source.id, keep_in_memory=True)
        elif (Path(source.id) / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(source.id, keep_in_memory=True)[source.split]
        else:
            dataset = datasets.load_dataset(
                source.id,
                source.config,
                split=source.split,
                revision=source.revision,
                cache_dir=cache,
                keep_in_memory=cache is not None,
            )
    except (KeyError, ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{name}, split {source.split!r}: cannot be loaded ({type(error).__name__}: {error}); "
            "check the id, config and split, and the network unless it is a local folder"
        ) from None
    if source.limit is not None:
        dataset = dataset.select(range(min(source.limit, len(dataset))))
    return dataset


def _column(source: DatasetSource, columns: list[str]) -> tuple[str, str]:
    """The column that holds the prompt, and the shape it has (the key parse_row knows)."""
    named = source.messages_column or source.prompt_column
    if named is not None:
        if named not in columns:
            raise ValueError(
                f"prepare.sources: dataset {source.id!r} has no column {named!r}; it has {columns}"
            )
        return named, "messages" if source.messages_column else "prompt"
    for shape in SHAPES:
        if shape in columns:
            return shape, shape
    raise ValueError(
        f"prepare.sources: dataset {source.id!r} has none of the columns {list(SHAPES)}; name one "
        f"of {columns} as messages_column or prompt_column"
    )


def _rows(
    source: DatasetSource, dataset: Any, *, column: str, shape: str
) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(dataset):
        value = row[column]
        turns = isinstance(value, list) and value and isinstance(value[0], dict)
        key = "conversations" if turns and "from" in value[0] else shape
        yield f"{source.id}:{number}", {key: value, "tools": row.get("tools")}
