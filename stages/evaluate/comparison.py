"""This evaluation against an earlier one: differences, whether they can be noise, and what else
changed. Pure.

Two intervals that overlap are called "within noise" whatever their middles: stricter than a test of
the difference, which would need both evaluations' rounds.
"""

from __future__ import annotations

from stages.evaluate import figures
from stages.evaluate.charts import Interval, finite
from stages.evaluate.figures import LENGTH, MACRO, SPEEDUP, Body
from stages.evaluate.tables import Cell, Table, written
from stages.nested import flatten

_NOT_SETTINGS = {"settings.evaluate.compare_with"}  # it chooses the report, not the numbers
_ABSENT = object()


def differences(now: tuple[Body, Body], earlier: tuple[Body, Body], *, key: str) -> Table:
    """A row a domain, the macro average last; each side a pair of metrics and serving."""
    new, old = figures.measured(*now, key), figures.measured(*earlier, key)
    suffix = "×" if key == SPEEDUP else ""
    rows = []
    for name, (value, interval) in new.items():
        before, before_interval = old.get(name, (None, None))
        difference = judged = None
        if finite(value) and finite(before):
            difference = value - before
            judged = verdict(difference, interval=interval, before=before_interval)
        rows.append(
            [
                Cell(name, css="average" if name == MACRO else ""),
                Cell(before, 2, suffix, before_interval),
                Cell(value, 2, suffix, interval),
                Cell(difference, 2, suffix, css="signed"),
                Cell(judged),
            ]
        )
    return Table(["domain", "earlier", "this one", "difference", "verdict"], rows)


def verdict(difference: float, *, interval: Interval, before: Interval) -> str:
    if not interval or not before:
        return "no interval: may be noise"
    if interval[0] <= before[1] and before[0] <= interval[1]:
        return "within noise"
    return "higher" if difference > 0 else "lower"


def headline(now: tuple[Body, Body], earlier: tuple[Body, Body]) -> list[str]:
    """A sentence for each macro average."""
    found = []
    for key in (LENGTH, SPEEDUP):
        *_, (_, before, value, difference, judged) = differences(now, earlier, key=key).rows
        if difference.value is not None:
            found.append(
                f"{figures.TITLES[key]}, macro average: {before.value:.2f} earlier, "
                f"{value.value:.2f} now; {judged.value}."
            )
    return found


def changed(now: Body, earlier: Body) -> Table:
    """Settings and environment that differ between two bodies of serving.json."""
    sides = [
        {
            key: value
            for key, value in flatten(
                {part: body.get(part) for part in ("settings", "environment")}
            )
            if key not in _NOT_SETTINGS
        }
        for body in (earlier, now)
    ]
    keys = list(dict.fromkeys([*sides[1], *sides[0]]))
    return Table(
        ["setting", "earlier", "this one"],
        [
            [Cell(key), *(Cell(written(side[key]) if key in side else None) for side in sides)]
            for key in keys
            if sides[0].get(key, _ABSENT) != sides[1].get(key, _ABSENT)
        ],
        "settings",
    )
