"""Notices a run that diverges, before it has cost the night."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from stages.params import TrainParams

MEMORY = 100  # losses that the median is over
FEWEST = 20  # losses before it means anything


class Divergence(ValueError):
    """The run diverged: what was seen, and what to do."""


class Watch:
    """Follows loss and gradient norm of every step; one watch a run."""

    def __init__(self, params: TrainParams) -> None:
        self._params = params
        self._usual: deque[float] = deque(maxlen=MEMORY)
        self.excess = 0

    @property
    def suspicious(self) -> bool:
        """The last loss was far above the usual: no state to resume from."""
        return self.excess > 0

    def check(self, *, step: int, loss: float, gradient_norm: float) -> None:
        """Raises Divergence where either is not finite, or where the loss has been above
        divergence_factor times its running median for divergence_steps steps. Call it before the
        update, so that the weights are still those that gave this loss."""
        for name, value in (("loss", loss), ("gradient norm", gradient_norm)):
            if not math.isfinite(value):
                raise Divergence(f"the {name} is {value} at step {step}")
        usual = median(self._usual) if len(self._usual) >= FEWEST else math.inf
        if loss <= self._params.divergence_factor * usual:
            self._usual.append(loss)
            self.excess = 0
            return
        self.excess += 1
        if self.excess >= self._params.divergence_steps:
            raise Divergence(
                f"the loss is {loss:.3g} at step {step}, and has been above "
                f"{self._params.divergence_factor} times its median of {usual:.3g} for "
                f"{self.excess} steps (train.divergence_factor, train.divergence_steps)"
            )
