"""Nested mappings as flat ones, for names of metrics and params and for tables of settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(body: Mapping[str, Any], *, separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings as (joined key, value); an empty mapping is a leaf."""
    for key, value in body.items():
        if isinstance(value, Mapping) and value:
            for inner, leaf in flatten(value, separator=separator):
                yield f"{key}{separator}{inner}", leaf
        else:
            yield key, value
