"""Shards of hidden states: written so that SIGKILL loses seconds, read at random without copying.

A shard is a Parquet file with one row a TOKEN and one row group a SAMPLE (contracts.states_schema),
so that its footer is the random-access index and a row group is one flat buffer. It is uncompressed
except with the encoding bfloat16_zstd, which splits bytes by their place in a token first.
Cost of a read: one pass over the bytes, 6 ms for 60 MB in the page cache. No torch here.

T tokens, P planes, H hidden size.
"""

from __future__ import annotations

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
        self._schema = contracts.states_schema(num_planes, hidden_size, encoding)
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
        self._files: dict[int, pq.ParquetFile] = {}

    @classmethod
    def of(cls, folder: Path, manifest: contracts.Manifest) -> ShardReader:
        """Of a hidden-states artifact. Raises ArtifactError where the manifest is of another."""
        if manifest.kind != "extract":
            raise contracts.ArtifactError(f"{folder}: expected kind 'extract', {manifest.kind!r}")
        info = manifest.info
        return cls(folder, info["num_planes"], info["hidden_size"], info["encoding"])

    def read(self, sample: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """The states of one row of contracts.SAMPLES: its bytes, [T, W] (serving/encoding.py).

        Uncompressed ones are the shard's mapped memory. Raises ArtifactError where
        the shard does not hold what the row says.
        """
        shard = int(sample["shard"])
        path = self._folder / shard_name(shard)
        if shard not in self._files:
            file = pq.ParquetFile(path, memory_map=True)
            if not file.schema_arrow.equals(self._schema):
                raise contracts.ArtifactError(
                    f"{path}: expected {self.num_planes} planes of {self.hidden_size}, found "
                    f"{file.schema_arrow}"
                )
            self._files[shard] = file
        column = self._files[shard].read_row_group(int(sample["row_group"])).column(0)
        if len(column) != sample["num_tokens"]:
            raise contracts.ArtifactError(
                f"{path}: sample {sample['id']} has {sample['num_tokens']} tokens, its row group "
                f"{sample['row_group']} has {len(column)}"
            )
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        width = array.type.byte_width
        found = np.frombuffer(
            array.buffers()[1], np.uint8, len(array) * width, offset=array.offset * width
        )
        return found.reshape(len(array), width)
