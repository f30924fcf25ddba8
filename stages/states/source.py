"""Where training reads hidden states: one interface, whether shards or vLLM hold them.

A reader names its samples in order and takes one after another; a source may be ahead of it, and
the memory of a sample is its own only until the next is taken. T tokens, P planes, H hidden size,
S supervised tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from stages import contracts
from stages.serving.encoding import decode
from stages.shards import ShardReader

Sample = dict[str, Any]
"""A row of contracts.SAMPLES."""


@dataclass(frozen=True)
class Loaded:
    """One sample's states; valid until the next sample is taken."""

    states: Tensor  # bfloat16 [T, P, H]
    log_sum_exp: Tensor  # float32 [S]


class Source(Protocol):
    """The states of an `extract` artifact."""

    num_planes: int
    hidden_size: int

    def read(self, samples: Iterable[Sample]) -> AbstractContextManager[Iterator[Loaded | None]]:
        """The samples' states, in their order; None for one that is rejected.

        Two may be open at once, the newer one to be closed first. Raises what the source's
        services or files raise.
        """
        ...


class CachedStates:
    """The states in an artifact's shards."""

    def __init__(self, folder: Path, manifest: contracts.Manifest) -> None:
        self._reader = ShardReader.of(folder, manifest)
        self.num_planes = self._reader.num_planes
        self.hidden_size = self._reader.hidden_size

    @contextmanager
    def read(self, samples: Iterable[Sample]) -> Iterator[Iterator[Loaded | None]]:
        yield (load(self._reader, sample) for sample in samples)


def load(reader: ShardReader, sample: Sample) -> Loaded:
    """One sample of a shard; bfloat16 states share the shard's mapped memory."""
    states = decode(
        torch.from_numpy(reader.read(sample)),
        num_planes=reader.num_planes,
        hidden_size=reader.hidden_size,
        encoding=reader.encoding,
    )
    return Loaded(states, torch.tensor(sample["log_sum_exp"], dtype=torch.float32))
