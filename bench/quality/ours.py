"""Our trainer as a contender: the profile's settings, through stages/train as a library."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.quality.problem import Problem
from stages.dspark.model import Drafter
from stages.params import TrainParams
from stages.train.batches import plan_epoch
from stages.train.optimizer import Optimizer
from stages.train.stage import plane_rms


class Ours:
    """Steps as stages/train/loop.py does, without its validation and resume points."""

    def __init__(self, problem: Problem, *, seed: int, learning_rate: float) -> None:
        self._params: TrainParams = problem.train.model_copy(
            update={"seed": seed, "learning_rate": learning_rate}
        )
        self._samples = problem.data.train
        self._drafter = Drafter(problem.config)
        self._drafter.initialise(seed=seed, target_norm=problem.weights.norm)
        self._drafter.condition(plane_rms(problem.data.reader, self._samples))
        self._passes = problem.passes(self._drafter, self._params)
        self._optimizer = Optimizer(self._drafter, self._params)
        self._batches = self._plan()

    def step(self, factor: float) -> float:
        documents, seeds = next(self._batches)
        batch = self._passes.load(
            [self._samples[i] for i in documents], self._params.anchors_per_sample, seeds
        )
        result = self._passes.forward(batch)
        loss = result.loss / result.weight.clamp(min=1e-6)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._drafter.parameters(), self._params.max_grad_norm)
        self._optimizer.step(self._params.learning_rate * factor)
        return float(loss.detach())

    def packaged(self) -> dict[str, Tensor]:
        return self._drafter.packaged()

    def _plan(self) -> Iterator[tuple[list[int], list[int]]]:
        """Documents and anchor seeds of batch after batch, epoch after epoch."""
        lengths = [sample["num_tokens"] for sample in self._samples]
        epoch = 0
        while True:
            seed = self._params.seed * 1_000_003 + epoch
            for documents in plan_epoch(lengths, batch_tokens=self._params.batch_tokens, seed=seed):
                yield documents, [seed * 1_000_003 + document for document in documents]
            epoch += 1
