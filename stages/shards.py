"""Shards of hidden states: written so that SIGKILL loses seconds, read at random without copying.

A shard is a Parquet file with one row a TOKEN and one row group a SAMPLE (contracts.states_schema),
so that its footer is the random-access index and a row group is one flat buffer. It is uncompressed
except with the encoding bfloat16_zstd, which splits bytes by their place in a token first.
Cost of an uncompressed read: none but the page faults of mapped memory. No torch here.

T tokens, P planes, H hidden size.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stages import contracts

SAMPLES_FILE = "samples.parquet"
CLOSE_S = 10.0  # a shard is closed after this long, so a kill loses no more
_PAGES, _ONE = b"dspark.pages", b"one a row group"  # a mark in the footer: values are contiguous
_LARGEST_PAGE = 2**30  # bytes; the default cuts a row group into pages of 1 MiB


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The rows of contracts.SAMPLES of a hidden-states artifact."""
    return contracts.read_table(folder / SAMPLES_FILE, contracts.SAMPLES)


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.parquet"


class ShardWriter:
    """Appends samples to shards in `folder`; `pieces` holds each closed shard's samples.

    A shard counts once its piece exists, which is written after it: a new writer keeps such shards
    (`samples` lists them) and deletes every other file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pieces: Path,
        num_planes: int,
        hidden_size: int,
        shard_bytes: int,
        encoding: str = contracts.BFLOAT16,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        pieces.mkdir(parents=True, exist_ok=True)
        self.folder, self._pieces, self.hidden_size = folder, pieces, hidden_size
        schema = contracts.states_schema(num_planes, hidden_size, encoding)
        self._schema = schema.with_metadata({_PAGES: _ONE})
        self._packed = encoding == contracts.BFLOAT16_ZSTD
        self._shard_bytes = shard_bytes
        self.samples: list[dict[str, Any]] = []
        kept = set()
        for piece in sorted(pieces.glob("shard-*.parquet")):
            if (folder / piece.name).is_file():
                self.samples += self.piece(piece)
                kept.add(piece.name)
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink()
        self._index = max((row["shard"] for row in self.samples), default=-1) + 1
        self._open: list[dict[str, Any]] = []
        self._bytes = 0
        self._opened_at = 0.0
        self._writer: pq.ParquetWriter | None = None

    @staticmethod
    def piece(path: Path) -> list[dict[str, Any]]:
        """The samples of a closed shard."""
        return contracts.read_table(path, contracts.SAMPLES)

    def append(self, states: npt.NDArray[np.uint8], sample: Mapping[str, Any]) -> bool:
        """Writes one sample's states (all its bytes, token-major) and remembers its row.

        `sample` is a row of contracts.SAMPLES; shard and row_group are set here. Returns whether
        that closed a shard.
        """
        width = self._schema.field("states").type.byte_width
        assert states.nbytes == sample["num_tokens"] * width, "states cover the sample"
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._unfinished(),
                self._schema,
                compression="zstd" if self._packed else "none",
                compression_level=1 if self._packed else None,
                use_byte_stream_split=self._packed,
                use_dictionary=False,
                write_statistics=False,
                data_page_size=_LARGEST_PAGE,
            )
            self._opened_at = time.monotonic()
        column = pa.FixedSizeBinaryArray.from_buffers(
            self._schema.field("states").type, sample["num_tokens"], [None, pa.py_buffer(states)]
        )
        self._writer.write_table(
            pa.table([column], schema=self._schema), row_group_size=sample["num_tokens"]
        )
        self._open.append({**sample, "shard": self._index, "row_group": len(self._open)})
        self._bytes += states.nbytes
        due = self._bytes >= self._shard_bytes or time.monotonic() - self._opened_at >= CLOSE_S
        if due:
            self.close()
        return due

    def close(self) -> None:
        """Publishes the open shard, then its piece. The writer may be used again."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        name = shard_name(self._index)
        with self._unfinished().open("rb") as file:
            os.fsync(file.fileno())
        self._unfinished().replace(self.folder / name)
        contracts.write_table(self._pieces / name, self._open, contracts.SAMPLES)
        self.samples += self._open
        self._open, self._bytes = [], 0
        self._index += 1

    def _unfinished(self) -> Path:
        return self.folder / (shard_name(self._index) + ".tmp")


class ShardReader:
    """Random access to the samples of shards in a folder. Not for several threads at once."""

    def __init__(
        self, folder: Path, num_planes: int, hidden_size: int, encoding: str = contracts.BFLOAT16
    ) -> None:
        self._folder = folder
        self.num_planes, self.hidden_size, self.encoding = num_planes, hidden_size, encoding
        self._schema = contracts.states_schema(num_planes, hidden_size, encoding)
        self._shards: dict[int, _Shard] = {}

    @classmethod
    def of(cls, folder: Path, manifest: contracts.Manifest) -> ShardReader:
        """Of a hidden-states artifact. Raises ArtifactError where the manifest is of another."""
        if manifest.kind != "extract":
            raise contracts.ArtifactError(f"{folder}: expected kind 'extract', {manifest.kind!r}")
        info = manifest.info
        return cls(folder, info["num_planes"], info["hidden_size"], info["encoding"])

    def read(self, sample: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """The states of one row of contracts.SAMPLES: its bytes, [T, W] (serving/encoding.py).

        Uncompressed ones are the shard's mapped memory. Raises ArtifactError where the shard does
        not hold what the row says.
        """
        shard, group = int(sample["shard"]), int(sample["row_group"])
        if shard not in self._shards:
            self._shards[shard] = _Shard(self._folder / shard_name(shard), self._schema)
        found = self._shards[shard].rows(group)
        if len(found) != sample["num_tokens"]:
            raise contracts.ArtifactError(
                f"{self._folder / shard_name(shard)}: sample {sample['id']} has "
                f"{sample['num_tokens']} tokens, its row group {group} has {len(found)}"
            )
        return found


class _Shard:
    """One open shard: its footer, and its bytes in mapped memory."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = pq.ParquetFile(path, memory_map=True)
        if not self._file.schema_arrow.equals(schema):
            raise contracts.ArtifactError(
                f"{path}: expected {schema}, found {self._file.schema_arrow}"
            )
        self._width: int = schema.field("states").type.byte_width
        marks = self._file.metadata.metadata or {}
        self._one_page = marks.get(_PAGES) == _ONE
        with path.open("rb") as file:  # a private mapping: torch wants writable memory
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def rows(self, group: int) -> npt.NDArray[np.uint8]:
        """A row group's values, [T, W]."""
        row_group = self._file.metadata.row_group(group)
        column, size = row_group.column(0), row_group.num_rows * self._width
        if not self._one_page or column.compression != "UNCOMPRESSED":
            return self._decoded(group)
        # Values are the end of a page: behind them the next column chunk begins.
        start = column.data_page_offset + column.total_compressed_size - size
        page = start - start % mmap.PAGESIZE
        self._bytes.madvise(mmap.MADV_WILLNEED, page, start + size - page)
        found = np.frombuffer(self._bytes, np.uint8, size, offset=start)
        return found.reshape(row_group.num_rows, self._width)

    def _decoded(self, group: int) -> npt.NDArray[np.uint8]:
        column = self._file.read_row_group(group).column(0)
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        size, offset = len(array) * self._width, array.offset * self._width
        found = np.frombuffer(array.buffers()[1], np.uint8, size, offset=offset)
        return found.reshape(len(array), self._width)
