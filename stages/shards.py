"""Shards of hidden states: written so that SIGKILL loses seconds, read at random without copying.

A shard is a Parquet file with one row a TOKEN and one row group a SAMPLE (contracts.states_schema),
uncompressed, so that its footer is the random-access index and a row group is one flat buffer.
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


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.parquet"


class ShardWriter:
    """Appends samples to shards in `folder`; `pieces` holds each closed shard's samples.

    A shard counts once its piece exists, which is written after it: a new writer keeps such shards
    (`samples` lists them) and deletes every other file.
    """

    def __init__(
        self, folder: Path, *, pieces: Path, num_planes: int, hidden_size: int, shard_bytes: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        pieces.mkdir(parents=True, exist_ok=True)
        self.folder, self._pieces = folder, pieces
        self._schema = contracts.states_schema(num_planes, hidden_size)
        self._shard_bytes = shard_bytes
        self.samples: list[dict[str, Any]] = []
        kept = set()
        for piece in sorted(pieces.glob("shard-*.parquet")):
            if (folder / piece.name).is_file():
                self.samples += contracts.read_table(piece, contracts.SAMPLES)
                kept.add(piece.name)
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink()
        self._index = max((row["shard"] for row in self.samples), default=-1) + 1
        self._open: list[dict[str, Any]] = []
        self._bytes = 0
        self._opened_at = 0.0
        self._writer: pq.ParquetWriter | None = None

    def append(self, states: npt.NDArray[np.uint8], sample: Mapping[str, Any]) -> None:
        """Writes one sample's states (all its bytes, token-major) and remembers its row.

        `sample` is a row of contracts.SAMPLES without shard and row_group.
        """
        width = self._schema.field("states").type.byte_width
        assert states.nbytes == sample["num_tokens"] * width, "states cover the sample"
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._unfinished(),
                self._schema,
                compression="none",
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
        if self._bytes >= self._shard_bytes or time.monotonic() - self._opened_at >= CLOSE_S:
            self.close()

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
    """Random access to the samples of a hidden-states artifact. Not for several threads at once."""

    def __init__(self, folder: Path, manifest: contracts.Manifest) -> None:
        """Raises ArtifactError where the manifest is not of hidden states."""
        if manifest.kind != "extract":
            raise contracts.ArtifactError(f"{folder}: expected kind 'extract', {manifest.kind!r}")
        self._folder = folder
        self.num_planes = int(manifest.info["num_planes"])
        self.hidden_size = int(manifest.info["hidden_size"])
        self._schema = contracts.states_schema(self.num_planes, self.hidden_size)
        self._files: dict[int, pq.ParquetFile] = {}

    def samples(self) -> list[dict[str, Any]]:
        """The rows of contracts.SAMPLES."""
        return contracts.read_table(self._folder / SAMPLES_FILE, contracts.SAMPLES)

    def read(self, sample: Mapping[str, Any]) -> npt.NDArray[np.uint16]:
        """The states of one row of contracts.SAMPLES: bfloat16 bits, [T, P, H].

        torch.from_numpy(...).view(torch.bfloat16) shares its memory. Raises ArtifactError where
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
        bits = np.frombuffer(
            array.buffers()[1], np.uint16, len(array) * width // 2, offset=array.offset * width
        )
        return bits.reshape(len(array), self.num_planes, self.hidden_size)
