"""Our trainer as a contender: the profile's settings, through stages/train as a library."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from bench.quality.problem import Problem
from stages.params import TrainParams
from stages.train import schedule
from stages.train.optimizer import Optimizer
from stages.train.start import fresh_drafter
from stages.train.supervision import trained_on


class Ours:
    """Steps as stages/train/loop.py does, without its validation and resume points."""

    def __init__(self, problem: Problem, *, seed: int, learning_rate: float) -> None:
        self._params: TrainParams = problem.train.model_copy(
            update={"seed": seed, "learning_rate": learning_rate}
        )
        self._samples = problem.data.train
        self._mask = trained_on(self._samples, problem.train)
        self._drafter = fresh_drafter(
            problem.config,
            seed=seed,
            weights=problem.weights,
            source=problem.data.source,
            samples=self._samples,
        )
        self._passes = problem.passes(self._drafter, self._params)
        self._optimizer = Optimizer(self._drafter, self._params)
        lengths = [sample["num_tokens"] for sample in self._samples]
        self._plan = schedule.plan(lengths, self._params)
        ahead = (documents for _, documents in schedule.plan(lengths, self._params))
        upcoming = self._passes.upcoming(self._samples, ahead)
        self._states = ExitStack().enter_context(problem.data.source.read(upcoming))

    def step(self, factor: float) -> float:
        epoch, documents = next(self._plan)
        seed = schedule.epoch_seed(self._params, epoch)
        batch = self._passes.load(
            [self._samples[i] for i in documents],
            self._states,
            self._params.anchors_per_sample,
            [seed * 1_000_003 + document for document in documents],
            mask=self._mask,
        )
        result = self._passes.forward(batch)
        loss = result.loss / result.weight.clamp(min=1e-6)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._drafter.parameters(), self._params.max_grad_norm)
        self._optimizer.step(self._params.learning_rate * factor)
        return float(loss.detach())

    def packaged(self) -> dict[str, Tensor]:
        return self._drafter.packaged()
