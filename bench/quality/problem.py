"""What both trainers share: the data, the drafter's shape, its vocabulary, and the one judge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.quality.data import Data
from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter
from stages.dspark.step import Frozen
from stages.params import Params, TrainParams
from stages.train.curves import domain_metrics
from stages.train.passes import Passes
from stages.train.stage import draft_vocabulary, frozen_tensors
from stages.train.validation import replay
from stages.weights import TargetWeights, load_target_weights

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Vd draft vocabulary."""

    data: Data
    config: DrafterConfig
    weights: TargetWeights
    vocab: Tensor  # int64 [Vd] target ids, by frequency in the training responses
    train: TrainParams  # of the profile; batch, anchors and schedule hold for the peer too

    @classmethod
    def of(cls, data: Data, params: Params) -> Problem:
        config = DrafterConfig.for_target(
            json.loads((data.target / "config.json").read_text()),
            **params.drafter.shape(),
            layer_ids=data.layer_ids,
            mask_token_id=data.target_manifest.info["mask_token_id"],
        )
        always = data.target_manifest.info["eos_token_ids"]
        return cls(
            data=data,
            config=config,
            weights=load_target_weights(data.target),
            vocab=draft_vocabulary(data.train, config, always=always),
            train=params.train,
        )

    def frozen(self, dtype: str) -> Frozen:
        return frozen_tensors(self.weights, self.vocab, self.config, dtype=dtype, device=CPU)

    def passes(self, drafter: Drafter, train: TrainParams) -> Passes:
        return Passes(
            drafter=drafter,
            frozen=self.frozen(train.dtype),
            source=self.data.source,
            params=train,
            device=CPU,
        )


def held_out(problem: Problem, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Greedy acceptance over the test responses, by set: drafts and acceptance_length.

    tensors: a trained drafter under its packaged names, whoever trained it.
    """
    drafter = Drafter(problem.config)
    drafter.load_packaged(tensors)
    samples = problem.data.test
    sets = sorted({sample["domain"] for sample in samples})
    tally = replay(problem.passes(drafter, problem.train), samples, domains=sets)
    return domain_metrics(tally, domains=sets)


def macro(sets: Mapping[str, Mapping[str, float]]) -> float:
    """The mean acceptance length over sets."""
    return sum(entry["acceptance_length"] for entry in sets.values()) / len(sets)
