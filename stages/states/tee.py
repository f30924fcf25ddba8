"""Shards that are written while a first epoch streams, and read from then on.

They lie in a folder of the recipe's, one below it for each rank of a training run: a rank writes
its own and reads those of all ranks that share its disk. A run that is started again, or another
training on the same states, finds them. A sample counts as held once its shard is closed.
"""

from __future__ import annotations

from pathlib import Path

from stages.shards import ShardReader, ShardWriter
from stages.states.receiver import Received
from stages.states.source import Loaded, Sample, load


class Tee:
    """One rank's shards in folder/rank-<index>, and the others' beside it.

    holds() may run in another thread than load() and append().
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        num_planes: int,
        hidden_size: int,
        encoding: str,
        shard_bytes: int,
    ) -> None:
        self._folder, self._layout = folder, (num_planes, hidden_size, encoding)
        self._writer = ShardWriter(
            folder / f"rank-{rank}" / "shards",
            pieces=folder / f"rank-{rank}" / "pieces",
            num_planes=num_planes,
            hidden_size=hidden_size,
            encoding=encoding,
            shard_bytes=shard_bytes,
        )
        self._held: dict[str, tuple[ShardReader, Sample]] = {}
        self._written: set[str] = {sample["id"] for sample in self._writer.samples}
        self._known_pieces: set[Path] = set()
        self._readers: dict[Path, ShardReader] = {}
        self.refresh()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def refresh(self) -> None:
        """Finds the shards that were closed since, by any rank."""
        for piece in sorted(self._folder.glob("rank-*/pieces/*.parquet")):
            if piece in self._known_pieces:
                continue
            shards = piece.parent.parent / "shards"
            reader = self._readers.setdefault(shards, ShardReader(shards, *self._layout))
            for sample in ShardWriter.piece(piece):
                self._held[sample["id"]] = (reader, sample)
            self._known_pieces.add(piece)

    def holds(self, sample: Sample) -> bool:
        if sample["id"] not in self._held:
            self.refresh()
        return sample["id"] in self._held

    def load(self, sample: Sample) -> Loaded:
        reader, row = self._held[sample["id"]]
        return load(reader, row)

    def append(self, sample: Sample, received: Received) -> None:
        """Writes a sample; one that came again, because its shard was still open, closes that."""
        if sample["id"] in self._written:
            self.close()
            return
        self._written.add(sample["id"])
        closed = self._writer.append(
            received.payload,
            {
                **sample,
                "log_sum_exp": received.log_sum_exp.tolist(),
                "sha256": received.sha256,
            },
        )
        if closed:
            self.refresh()

    def close(self) -> None:
        self._writer.close()
        self.refresh()
