"""How many of its drafted tokens each request has verified: the hardware-aware prefix scheduler
(DSpark paper, algorithm 1), and the fixed and the static rule to compare it with.

R requests, N slots a block, K blocks. survival [R, N] is the cumulative product of the calibrated
confidences: the probability that the slot and all before it are accepted. A round then yields
R + sum of the admitted survivals tokens in the time of one target step over R + admitted tokens,
one draft pass over R requests and the engine's own work around them (overhead); the scheduler
maximises the quotient.

Admission goes through the slots in the order of their survival and stops at the first that does not
raise the quotient. Whether a slot is verified so never depends on the token drafted there, nor on a
later one's (a search for the best of all lengths would: the paper's appendix A shows how that
changes the output's distribution). It finds the best length all the same where the quotient has
one peak, which a convex cost table ensures: the tokens are concave in the number admitted.

Cost: one sort of R * N numbers; no loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class CostTable:
    """Seconds of a target step by tokens in all, and of a draft pass by requests.

    Made of measured points; between them, and beyond the last, a straight line. The target's points
    are replaced by the largest convex function below them: an engine's time rises in steps, and
    the end of a flat stretch is what it offers for the price.
    """

    def __init__(
        self, *, step_s: Mapping[int, float], draft_s: Mapping[int, float], max_tokens: int
    ) -> None:
        """`max_tokens`: the most tokens of a step that will be asked for. Raises ValueError for a
        table without points or with times that are not positive."""
        for name, points in (("target step", step_s), ("draft pass", draft_s)):
            if not points or min(points.values()) <= 0:
                raise ValueError(f"cost table: a {name} needs positive times, found {points}")
        self.step_s = _interpolate(_convex(dict(step_s)), size=max_tokens + 1)
        self.draft_s = _interpolate(dict(draft_s), size=max_tokens + 1)

    @property
    def max_tokens(self) -> int:
        return len(self.step_s) - 1

    def step(self, tokens: int) -> float:
        """Seconds of a target step; beyond the table, of its last entry."""
        return float(self.step_s[min(tokens, self.max_tokens)])

    def draft(self, num_requests: int) -> float:
        """Seconds of a draft pass; beyond the table, of its last entry."""
        return float(self.draft_s[min(num_requests, self.max_tokens)])

    def steps(self, tokens: Tensor) -> Tensor:
        """Seconds of target steps over that many tokens, fractions too: float64 of their shape."""
        low = tokens.floor().long().clamp(max=self.max_tokens - 1)
        part = (tokens - low).double()
        return self.step_s[low] + part * (self.step_s[low + 1] - self.step_s[low])


def survival(confidences: Tensor) -> Tensor:
    """[..., N]: probability that a slot and all before it are accepted."""
    return confidences.double().cumprod(-1)


class Overhead(NamedTuple):
    """Seconds of a round that the cost table does not know; may be negative where it is too high.

    Part of the quotient only: the same for every length, so that no length is looked ahead for.
    """

    drafting: float = 0.0
    idle: float = 0.0


NO_OVERHEAD = Overhead()


def admit(survivals: Tensor, costs: CostTable, overhead: Overhead = NO_OVERHEAD) -> Tensor:
    """Lengths int64 [R] by algorithm 1. survivals [R, N]: never rising along N."""
    num_requests, num_slots = survivals.shape
    value, order = _sorted(survivals)
    admitted, _ = _best(
        value, num_requests=num_requests, weight=1.0, costs=costs, overhead_s=overhead.drafting
    )
    return torch.bincount(order[:admitted] % num_requests, minlength=num_requests).clamp(
        max=num_slots
    )


def draft_gain(
    recent: Tensor, *, num_requests: int, costs: CostTable, overhead: Overhead = NO_OVERHEAD
) -> float:
    """What drafting is expected to give now: tokens a second over those without any draft.

    recent [K, N]: survivals of blocks drafted lately, taken for what the next ones will be like;
    each stands for num_requests / K requests. Below 1, a round that drafts nothing is faster.
    """
    value, _ = _sorted(recent)
    weight = num_requests / len(recent)
    _, rate = _best(
        value,
        num_requests=num_requests,
        weight=weight,
        costs=costs,
        overhead_s=overhead.drafting,
    )
    idle_s = costs.step(num_requests)
    return rate * (idle_s + _bounded(overhead.idle, table_s=idle_s)) / num_requests


def fixed_lengths(survivals: Tensor, *, length: int) -> Tensor:
    """int64 [R]: `length` slots of every request."""
    num_requests, num_slots = survivals.shape
    return torch.full((num_requests,), min(length, num_slots))


def threshold_lengths(survivals: Tensor, *, threshold: float) -> Tensor:
    """int64 [R]: the slots before the first whose survival is below the threshold."""
    return (survivals >= threshold).long().cumprod(-1).sum(-1)


def _sorted(survivals: Tensor) -> tuple[Tensor, Tensor]:
    """All survivals, falling; among equals a request's earlier slot comes first. The indices are
    of the slot-major order: slot * R + request."""
    return survivals.t().flatten().sort(descending=True, stable=True)


def _best(
    value: Tensor, *, num_requests: int, weight: float, costs: CostTable, overhead_s: float
) -> tuple[int, float]:
    """How many of the sorted survivals to admit, and the tokens a second that gives.

    Each stands for `weight` tokens. Survival 0 is never admitted.
    """
    count = torch.arange(len(value) + 1, dtype=torch.float64)
    tokens = num_requests + weight * count
    expected = num_requests + weight * torch.cat([value.new_zeros(1), value.cumsum(0)])
    # A step that the table does not reach costs what its last stretch extrapolates to.
    table_s = costs.steps(tokens) + costs.draft(num_requests)
    rate = expected / (table_s + _bounded(overhead_s, table_s=float(table_s[0])))
    stops = (rate[1:] <= rate[:-1]) | (value <= 0)
    admitted = int(stops.nonzero()[0]) if bool(stops.any()) else len(value)
    return admitted, float(rate[admitted])


def _bounded(overhead_s: float, *, table_s: float) -> float:
    """At least half of what the table says remains."""
    return max(overhead_s, -0.5 * table_s)


def _convex(points: dict[int, float]) -> dict[int, float]:
    """The points on the lower convex hull of (tokens, seconds)."""
    hull: list[tuple[int, float]] = []
    for point in sorted(points.items()):
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return dict(hull)


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _interpolate(points: dict[int, float], *, size: int) -> Tensor:
    """float64 [size]: constant before the first point, a line through the last two after them."""
    known = sorted(points.items())
    if len(known) == 1:
        return torch.full((size,), known[0][1], dtype=torch.float64)
    x, y = torch.tensor(known, dtype=torch.float64).t().contiguous()
    index = torch.arange(size, dtype=torch.float64)
    right = torch.searchsorted(x, index).clamp(1, len(x) - 1)
    slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    values = y[right - 1] + slope * (index - x[right - 1])
    values = torch.where(index < x[0], y[0], values)
    # A noisy last stretch must not fall, below zero in the end.
    return torch.where(index > x[-1], values.clamp(min=float(y[-1])), values)
