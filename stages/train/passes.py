"""One pass of the drafter over samples: read, move, autocast, forward.

With several ranks each takes its share of a batch's documents, and all run the same passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stages.dspark.model import Drafter
from stages.dspark.step import Batch, Frozen, LossWeights, StepResult, forward_batch
from stages.params import TrainParams
from stages.states.source import Loaded, Sample, Source
from stages.train.batches import load_batch
from stages.train.distributed import ALONE, Ranks
from stages.train.supervision import Mask


class Pass(nn.Module):
    """forward_batch as a module, which is what ranks wrap: parameters are whole all through it."""

    def __init__(self, drafter: Drafter, frozen: Frozen, params: TrainParams) -> None:
        super().__init__()
        self.drafter, self.frozen = drafter, frozen
        self.weights = LossWeights(
            ce=params.ce_weight,
            tv=params.tv_weight,
            kl=params.kl_weight,
            confidence=params.confidence_weight,
            ce_label=params.ce_label,
            position_weighting=params.position_weighting,
            position_decay=params.position_decay,
            dpace_smoothing=params.dpace_smoothing,
        )

    def forward(self, batch: Batch) -> StepResult:
        return forward_batch(self.drafter, batch, self.frozen, weights=self.weights)


@dataclass(kw_only=True)
class Passes:
    """What training and validation share: where samples come from and how they are computed."""

    drafter: Drafter
    frozen: Frozen
    source: Source
    params: TrainParams
    device: torch.device
    ranks: Ranks = ALONE
    _module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        module = Pass(self.drafter, self.frozen, self.params)
        self._module = self.ranks.wrapped(module, device=self.device)

    def share(self, documents: Sequence[int]) -> tuple[list[int], list[int]]:
        """This rank's documents of a batch, and those to load: one without blocks where it has
        none, so that it takes part in every pass and adds zeros."""
        own = self.ranks.deal(documents)
        return own, own or list(documents[:1])

    def upcoming(
        self, samples: Sequence[Sample], batches: Iterable[Sequence[int]]
    ) -> Iterator[Sample]:
        """What load() will take for these batches, in its order: for Source.read."""
        for documents in batches:
            for document in self.share(documents)[1]:
                yield samples[document]

    def load(
        self,
        samples: Sequence[Sample],
        states: Iterator[Loaded | None],
        num_anchors: int,
        seeds: Sequence[int],
        *,
        mask: Mask = "loss_mask",
        without_blocks: bool = False,
    ) -> Batch:
        """The samples' batch on the device, in the dtype of the computation. Their states are the
        next of `states`."""
        batch = load_batch(
            samples,
            states,
            num_planes=self.source.num_planes,
            hidden_size=self.source.hidden_size,
            num_anchors=num_anchors,
            seeds=seeds,
            mask=mask,
        )
        if without_blocks:
            batch = batch._replace(anchors=torch.full_like(batch.anchors, -1))
        if self.params.dtype == "float32":
            batch = batch._replace(planes=batch.planes.float(), last=batch.last.float())
        return Batch(*(tensor.to(self.device, non_blocking=True) for tensor in batch))

    def forward(self, batch: Batch) -> StepResult:
        with self.autocast():
            result: StepResult = self._module(batch)
        return result

    def autocast(self) -> AbstractContextManager[Any]:
        if self.params.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
