"""Profiles: named values for params.yaml, written into it visibly, as `dvc exp run -S` does.

A run's values are profiles/default.yaml, then the named profile, then the overrides. A profile may
only name what default.yaml names, so that switching back restores every value; comments in
params.yaml are kept, and the file is not touched where nothing changes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stages.params import PARAMS_FILE, check_params

FOLDER = Path("profiles")
DEFAULT = "default"

Value = bool | int | float | str | list[Any] | dict[str, Any] | None
"""What params.yaml can hold under a key."""


@dataclass(frozen=True)
class Change:
    """One value that apply() wrote."""

    key: str
    before: Value
    after: Value

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def names(folder: Path = FOLDER) -> list[str]:
    """The profiles there are, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def values(profile: str, *, folder: Path = FOLDER) -> dict[str, Value]:
    """{dotted key: value} of default.yaml with the profile on top.

    Raises ValueError for an unknown profile or a key that default.yaml does not name.
    """
    if profile not in names(folder):
        raise ValueError(f"profile: expected one of {names(folder)} ({folder}/), found {profile!r}")
    merged = _read(folder / f"{DEFAULT}.yaml")
    own = _read(folder / f"{profile}.yaml")
    unknown = sorted(set(own) - set(merged))
    if unknown:
        raise ValueError(
            f"{folder}/{profile}.yaml names {unknown}, which {folder}/{DEFAULT}.yaml does not; add "
            "them there, so that switching back restores their values"
        )
    return merged | own


def apply(
    profile: str,
    *,
    overrides: Mapping[str, Value],
    params_file: Path = PARAMS_FILE,
    folder: Path = FOLDER,
) -> list[Change]:
    """Writes a profile and overrides (dotted keys) into params.yaml and returns what changed.

    Everything is checked before anything is written. Raises ValueError naming the key.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import RoundTripRepresenter

    # A class of its own: representers belong to the class, and DVC writes dvc.lock with ruamel too.
    class Representer(RoundTripRepresenter):
        pass

    Representer.add_representer(
        type(None), lambda it, _: it.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    editor = YAML()
    editor.Representer = Representer
    editor.preserve_quotes = True
    editor.width = 4096
    editor.indent(mapping=2, sequence=4, offset=2)
    text = params_file.read_text()
    current, document = yaml.safe_load(text), editor.load(text)
    changes = []
    for key, value in (values(profile, folder=folder) | dict(overrides)).items():
        before = _get(current, key)
        if before != value or type(before) is not type(value):
            _set(document, key, value)
            changes.append(Change(key, before, value))
    if not changes:
        return []
    buffer = io.StringIO()
    editor.dump(document, buffer)
    # Checked as it will be read, so that a mistake leaves the file alone.
    check_params(yaml.safe_load(buffer.getvalue()), f"{params_file} with profile {profile!r}")
    unfinished = params_file.with_name(params_file.name + ".tmp")
    unfinished.write_text(buffer.getvalue())
    unfinished.replace(params_file)
    return changes


def parse_override(text: str) -> tuple[str, Value]:
    """`drafter.num_layers=2` as (key, value); the value is YAML. Raises ValueError."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"--set: expected section.key=value, found {text!r}")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {key}: not a YAML value: {value!r} ({error})") from None


def _read(path: Path) -> dict[str, Value]:
    sections = yaml.safe_load(path.read_text()) or {}
    if not isinstance(sections, dict) or not all(isinstance(s, dict) for s in sections.values()):
        raise ValueError(f"{path}: expected sections of params.yaml with keys and values")
    return dict(_flat(sections))


def _flat(sections: dict[str, dict[str, Value]]) -> Iterator[tuple[str, Value]]:
    # A section's values may be mappings (role_map): they are set as a whole.
    for section, entries in sections.items():
        for key, value in entries.items():
            yield f"{section}.{key}", value


def _get(document: Any, key: str) -> Value:
    for part in key.split("."):
        if not isinstance(document, dict) or part not in document:
            return None
        document = document[part]
    return document


def _set(document: Any, key: str, value: Value) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        document = document.setdefault(parent, {})
        if not isinstance(document, dict):
            raise ValueError(f"{key}: {parent} is a value in params.yaml, not a section")
    document[last] = _in_one_line(value)


def _in_one_line(value: Value) -> Any:
    """Lists and mappings as [a, b] and {a: b}, the style of params.yaml."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if not isinstance(value, list | dict):
        return value
    styled: Any = CommentedSeq(value) if isinstance(value, list) else CommentedMap(value)
    styled.fa.set_flow_style()
    return styled
