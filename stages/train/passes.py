"""One pass of the drafter over samples of the cache: read, move, autocast, forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stages.dspark.model import Drafter
from stages.dspark.step import Batch, Frozen, LossWeights, StepResult, forward_batch
from stages.params import TrainParams
from stages.shards import ShardReader
from stages.train.batches import load_batch

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What training and validation share: where samples come from and how they are computed."""

    drafter: Drafter
    frozen: Frozen
    reader: ShardReader
    params: TrainParams
    device: torch.device

    def load(self, samples: Sequence[Sample], num_anchors: int, seeds: Sequence[int]) -> Batch:
        """The samples' batch on the device, in the dtype of the computation."""
        batch = load_batch(self.reader, samples, num_anchors=num_anchors, seeds=seeds)
        if self.params.dtype == "float32":
            batch = batch._replace(planes=batch.planes.float(), last=batch.last.float())
        return Batch(*(tensor.to(self.device, non_blocking=True) for tensor in batch))

    def forward(self, batch: Batch) -> StepResult:
        params = self.params
        weights = LossWeights(
            ce=params.ce_weight,
            tv=params.tv_weight,
            kl=params.kl_weight,
            confidence=params.confidence_weight,
            ce_label=params.ce_label,
            position_weighting=params.position_weighting,
            position_decay=params.position_decay,
            dpace_smoothing=params.dpace_smoothing,
        )
        with self._autocast():
            return forward_batch(self.drafter, batch, self.frozen, weights=weights)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.params.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
