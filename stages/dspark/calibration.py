"""Sequential temperature scaling of the confidences (DSpark paper, section 3.2.1).

K blocks, N slots. A slot's confidence is the probability that its draft is accepted if those
before it are; the scheduler needs their cumulative product, the survival, to be right in size. From
the first slot to the last, the temperature that divides the slot's logit is chosen on a grid so
that the expected calibration error of the survival is least, the temperatures before it fixed.

A temperature stays 1 where too few blocks reach the slot, or where it does not lower the error of a
second set of responses, which had no part in choosing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUM_BINS = 15  # of equal width (Guo et al. 2017)
GRID = 81


class Blocks(NamedTuple):
    """Held-out blocks, drafted as serving does."""

    confidences: Tensor  # float32 [K, N], probabilities as the head gives them
    accepted: Tensor  # int64 [K], leading drafts that are the target's own tokens
    slots: Tensor  # int64 [K], slots that have a token to compare with
    sample: Tensor  # int64 [K], the response


def fit(blocks: Blocks, *, min_blocks: int, max_temperature: float) -> dict[str, Any]:
    """calibration.json: temperatures within 1/max_temperature..max_temperature, and how well the
    survival is calibrated before and after, over all blocks.

    Raises ValueError where there is no block.
    """
    if not len(blocks.accepted):
        raise ValueError("calibration: the drafter's held-out blocks are empty; train it again")
    # By response: blocks of one response are alike.
    even = blocks.sample % 2 == 0
    parts = [Blocks(*(column[chosen] for column in blocks)) for chosen in (even, ~even)]
    num_slots = blocks.confidences.shape[1]
    temperatures: list[float] = []
    kept: list[bool] = []
    for slot in range(num_slots):
        best = 1.0
        if all(int((part.slots > slot).sum()) >= min_blocks for part in parts):
            grid = torch.logspace(-1, 1, GRID, base=max_temperature).tolist()
            best = min(grid, key=lambda t: (_error(parts[0], [*temperatures, t]), abs(t - 1.0)))
            if _error(parts[1], [*temperatures, best]) >= _error(parts[1], [*temperatures, 1.0]):
                best = 1.0
        temperatures.append(best)
        kept.append(best != 1.0)
    return {
        "method": "sequential temperature scaling",
        "samples": len(blocks.sample.unique()),
        "blocks": len(blocks.accepted),
        "slots": [
            {
                "slot": slot + 1,
                "temperature": temperatures[slot],
                "kept": kept[slot],
                "blocks": int((blocks.slots > slot).sum()),
                "before": _judged(blocks, [1.0] * (slot + 1)),
                "after": _judged(blocks, temperatures[: slot + 1]),
            }
            for slot in range(num_slots)
        ],
    }


def calibrated(confidences: Tensor, temperatures: Tensor) -> Tensor:
    """float32 [..., N] from probabilities [..., N] and temperatures [N]."""
    return (confidences.float().logit(eps=1e-6) / temperatures).sigmoid()


def reliability(probability: Tensor, happened: Tensor) -> list[dict[str, float]]:
    """Bins of equal width that hold a block: mean confidence, share accepted, and blocks."""
    place = (probability * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    count = torch.bincount(place, minlength=NUM_BINS)
    mean = torch.bincount(place, weights=probability.double(), minlength=NUM_BINS) / count
    share = torch.bincount(place, weights=happened.double(), minlength=NUM_BINS) / count
    return [
        {"confidence": float(mean[i]), "accepted": float(share[i]), "blocks": int(count[i])}
        for i in count.nonzero().flatten().tolist()
    ]


def expected_calibration_error(bins: Sequence[dict[str, float]]) -> float:
    """Mean distance of confidence and share accepted over the bins, weighted by blocks."""
    total = sum(bin["blocks"] for bin in bins)
    return sum(abs(bin["confidence"] - bin["accepted"]) * bin["blocks"] for bin in bins) / total


def area_under_curve(probability: Tensor, happened: Tensor) -> float | None:
    """Probability that an accepted block is above one that is not (ties count half); None where
    one of the kinds is missing."""
    positives, negatives = int(happened.sum()), int((~happened).sum())
    if not positives or not negatives:
        return None
    _, place, count = probability.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    rank = (last - (count - 1) / 2)[place]  # equal values share their mean rank
    above = float(rank[happened].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def _survival(blocks: Blocks, temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Of the last slot of `temperatures`: its survival, and whether it was accepted."""
    slot = len(temperatures)
    reached = blocks.slots >= slot
    confidences = blocks.confidences[reached, :slot]
    probability = calibrated(confidences, torch.tensor(temperatures)).prod(-1)
    return probability, blocks.accepted[reached] >= slot


def _error(blocks: Blocks, temperatures: Sequence[float]) -> float:
    return expected_calibration_error(reliability(*_survival(blocks, temperatures)))


def _judged(blocks: Blocks, temperatures: Sequence[float]) -> dict[str, Any]:
    probability, happened = _survival(blocks, temperatures)
    if not len(probability):
        return {"ece": None, "auc": None, "reliability": []}
    bins = reliability(probability, happened)
    return {
        "ece": expected_calibration_error(bins),
        "auc": area_under_curve(probability, happened),
        "reliability": bins,
    }
