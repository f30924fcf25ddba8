"""What a person sees while a run goes on: steps, acceptance length and the time left."""

from __future__ import annotations

from collections import deque
from typing import Any, Self

from tqdm import tqdm

from stages.params import TrainParams
from stages.train.checkpoint import Progress
from stages.train.schedule import validation_steps

RECENT_STEPS = 50  # that the time left is estimated from


def time_left_s(
    *, step: int, num_steps: int, validations: int, step_s: float, validation_s: float
) -> float:
    """Of the steps and the validations that are still to come, in seconds."""
    due = validation_steps(num_steps, validations=validations)
    return (num_steps - step) * step_s + sum(at > step for at in due) * validation_s


class Bar:
    """A progress bar whose time left counts validations; `say` prints a line above it."""

    def __init__(self, progress: Progress, params: TrainParams, *, shown: bool) -> None:
        self._shown = shown
        self._params = params
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._validation_s = 0.0
        self._bar = tqdm(
            total=progress.num_steps,
            initial=progress.step,
            desc="train",
            unit="step",
            mininterval=1,
            disable=not shown,
            bar_format="{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, progress: Progress, *, loss: float, seconds: float) -> None:
        """Moves on by one step, which took `seconds`."""
        self._recent.append(seconds)
        shown: dict[str, Any] = {"loss": loss}
        if progress.curve:
            shown["acceptance_length"] = progress.curve[-1]["validation_acceptance_length"]
        if progress.num_steps is not None:
            self._bar.total = progress.num_steps
            left = time_left_s(
                step=progress.step,
                num_steps=progress.num_steps,
                validations=self._params.validations,
                step_s=sum(self._recent) / len(self._recent),
                validation_s=self._validation_s,
            )
            shown["left"] = tqdm.format_interval(left)
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def validated(self, *, seconds: float) -> None:
        """Remembers what one validation took."""
        self._validation_s = seconds

    def say(self, line: str) -> None:
        if self._shown:
            tqdm.write(line)
