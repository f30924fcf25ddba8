"""Throughput at matched interactivity: what each engine gives while its users wait equally long.

Interactivity is the tokens a second of the median user, throughput those of the whole engine. More
requests in flight trade one for the other along each engine's curve. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Point = Mapping[str, Any]


def points(sides: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One engine's curve from its load by concurrency; what was not measured is left out."""
    return [
        {
            "concurrency": concurrency,
            "interactivity": side["tokens_per_s_per_user"],
            "throughput": side["tokens_per_s"],
        }
        for concurrency, side in sorted(sides.items())
        if side["tokens_per_s_per_user"] is not None and side["tokens_per_s"] > 0
    ]


def matched(drafter: Sequence[Point], baseline: Sequence[Point]) -> list[dict[str, float]]:
    """Both throughputs and their ratio at every interactivity that either engine was measured at
    and both reached.

    A curve joins the points that no other one of the same engine beats in both; between them it is
    a straight line, and it is never extended. Quotients of lines are monotonic between such points,
    so the best ratio is among them.
    """
    if not drafter or not baseline:
        return []
    curves = {"drafter": _curve(drafter), "baseline": _curve(baseline)}
    low = max(curve[0][0] for curve in curves.values())
    high = min(curve[0][-1] for curve in curves.values())
    measured = {speed for curve in curves.values() for speed in curve[0]} | {low, high}
    found = []
    for speed in sorted(speed for speed in measured if low <= speed <= high):
        at = {name: float(np.interp(speed, *curve)) for name, curve in curves.items()}
        found.append({"interactivity": speed, **at, "ratio": at["drafter"] / at["baseline"]})
    return found


def compare(
    drafter: Mapping[int, Mapping[str, Any]], baseline: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """serving.json's `pareto`, from the load by concurrency of both engines."""
    both = {"drafter": points(drafter), "baseline": points(baseline)}
    rows = matched(both["drafter"], both["baseline"])
    best = max(rows, key=lambda row: row["ratio"], default=None)
    return {
        "points": both,
        "matched": rows,
        "best_ratio": best["ratio"] if best else None,
        "at_interactivity": best["interactivity"] if best else None,
    }


def _curve(given: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Increasing interactivities and falling throughputs of the points that no other one beats in
    both: nobody would serve at the others, and a disturbed one would bend the curve."""
    curve: list[tuple[float, float]] = []
    for point in sorted(given, key=lambda p: (-p["interactivity"], -p["throughput"])):
        if not curve or point["throughput"] > curve[-1][1]:
            curve.append((point["interactivity"], point["throughput"]))
    return [speed for speed, _ in curve[::-1]], [whole for _, whole in curve[::-1]]
