"""Charts as geometry, which report.html.j2 draws as inline SVG. Pure; ticks are matplotlib's.

x is a percentage of the plot's width and y a number of pixels, so a chart fills whatever room it
has and its text keeps its size: a scaled picture would be too small to read in a narrow window.
Colours are CSS classes. A value that is not a finite number leaves a gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from matplotlib.ticker import MaxNLocator

Interval = Sequence[float] | None

_ROW, _BAR = 26, 14  # pixels: a row of bars, and its bar
_NARROW = 240.0  # pixels of a plot in the narrowest window: x labels are thinned to fit there
_CHARACTER = 7.5  # pixels; wide fonts, and bold


@dataclass(frozen=True)
class Label:
    x: float
    y: float
    text: str
    css: str = ""
    anchor: str = "middle"
    dx: int = 0


@dataclass(frozen=True)
class Stroke:
    """A broken line: segments of (x1, y1, x2, y2) under one class and one tooltip."""

    css: str
    segments: Sequence[tuple[float, float, float, float]]
    tip: str = ""


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    css: str
    tip: str
    radius: float = 3.5


@dataclass(frozen=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    css: str
    tip: str


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    summary: str  # for those who do not see it
    height: float  # pixels, as the paddings
    left: int
    right: int
    x_name: str = ""
    grid: list[Stroke] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    strokes: list[Stroke] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)  # (class, name)


@dataclass(frozen=True)
class Line:
    name: str
    css: str
    points: Sequence[tuple[float | None, float | None]]
    notes: Sequence[str] = ()  # per point, behind the numbers of its tooltip
    captions: Sequence[str] = ()  # per point, written beside it
    captions_below: bool = False
    radius: float = 3.5


@dataclass(frozen=True)
class Dot:
    name: str
    css: str
    value: float | None
    interval: Interval = None


@dataclass(frozen=True)
class Row:
    """A line of a chart of bars or dots."""

    name: str
    dots: Sequence[Dot]
    average: bool = False


def finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def exact(value: float) -> str:
    """For tooltips: five digits, more only where they stand before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"


def lines(
    title: str,
    *,
    unit: str,
    x_name: str,
    series: Sequence[Line],
    low: float | None = 0.0,
    high: float | None = None,
    at: Sequence[float] | None = None,
    logarithmic: bool = False,
    diagonal: bool = False,
    reference: float | None = None,
    height: int = 200,
    legend: bool = True,
) -> Chart:
    """Lines over x. low, high: of y, None for the data's own; at: labelled places of x (otherwise
    round numbers from zero on); diagonal: y = x; reference: a level of y that is marked."""
    known = [point for line in series for point in _known(line)]
    levels = [y for _, y in known] + ([] if reference is None else [reference])
    y_ticks = _ticks(
        min(levels, default=0.0) if low is None else low,
        max(levels, default=1.0) if high is None else high,
    )
    places = sorted(at) if at is not None else _ticks(0.0, max((x for x, _ in known), default=1.0))
    across = _Scale(places, logarithmic=logarithmic)
    up = _Scale(y_ticks)

    def x_of(value: float) -> float:
        return round(100 * across(value), 2)

    def y_of(value: float) -> float:
        return round(height * (1 - up(value)), 1)

    chart = Chart(
        title=title,
        unit=unit,
        summary=_summary(series, unit=unit, x_name=x_name),
        height=height,
        left=10 + round(_CHARACTER * max(len(_tick(tick)) for tick in y_ticks)),
        right=18,
        x_name=x_name,
        legend=[(line.css, line.name) for line in series] if legend and len(series) > 1 else [],
    )
    for tick in y_ticks:
        chart.grid.append(Stroke("", [(0, y_of(tick), 100, y_of(tick))]))
        chart.labels.append(Label(0, y_of(tick) + 4, _tick(tick), anchor="end", dx=-8))
    chart.labels.extend(_below([(x_of(place), _tick(place)) for place in places], y=height + 18))
    if diagonal:
        chart.grid.append(Stroke("reference", [(x_of(0), y_of(0), x_of(1), y_of(1))]))
    if reference is not None:
        chart.grid.append(Stroke("reference", [(0, y_of(reference), 100, y_of(reference))]))
    for line in series:
        placed = [(x_of(x), y_of(y)) if finite(x) and finite(y) else None for x, y in line.points]
        segments = [
            (*first, *second) for first, second in itertools.pairwise(placed) if first and second
        ]
        chart.strokes.append(Stroke(line.css, segments, line.name))
        for index, (place, (x, y)) in enumerate(zip(placed, line.points, strict=True)):
            if place is None or x is None or y is None or not line.radius:
                continue
            tip = f"{line.name}, {x_name} {exact(x)}: {exact(y)} {unit}".strip()
            if line.notes:
                tip += f" ({line.notes[index]})"
            chart.marks.append(Mark(*place, line.css, tip, line.radius))
            if line.captions:
                anchor, dx, dy = ("end", -6, 13) if line.captions_below else ("start", 6, -5)
                chart.labels.append(
                    Label(place[0], place[1] + dy, line.captions[index], "caption", anchor, dx)
                )
    return chart


def bars(title: str, *, unit: str, rows: Sequence[Row], start: float) -> Chart:
    """Bars from `start`, one a row (its first dot), with the interval as a line and the value in
    words. A row without a value says so."""
    scale, chart = _rows(title, unit=unit, rows=rows, start=start, right=56, legend=False)
    zero = round(100 * scale(start), 2)
    for index, row in enumerate(rows):
        (dot, *_) = row.dots
        middle = _ROW * index + _ROW / 2
        if not finite(dot.value):
            chart.labels.append(Label(zero, middle + 4, "not measured", "muted", "start", 6))
            continue
        end = round(100 * scale(dot.value), 2)
        tip = _tip(row.name, dot, unit=unit)
        chart.bars.append(
            Bar(
                x=min(zero, end),
                y=middle - _BAR / 2,
                width=round(abs(end - zero), 2),
                height=_BAR,
                css=f"{dot.css} average" if row.average else dot.css,
                tip=tip,
            )
        )
        chart.strokes.extend(_whisker(dot, scale=scale, y=middle, css="whisker", tip=tip))
        right = max(start, dot.value, *(dot.interval or ()))
        text = f"{dot.value:.2f}{'×' if unit.startswith('×') else ''}"
        css = "value average" if row.average else "value"
        chart.labels.append(Label(round(100 * scale(right), 2), middle + 4, text, css, "start", 7))
    chart.grid.append(Stroke("axis", [(zero, 0, zero, chart.height)]))
    return chart


def dots(title: str, *, unit: str, rows: Sequence[Row], start: float) -> Chart:
    """Dots with their intervals, several a row, one above the other."""
    scale, chart = _rows(title, unit=unit, rows=rows, start=start, right=18, legend=True)
    for index, row in enumerate(rows):
        for place, dot in enumerate(row.dots):
            if not finite(dot.value):
                continue
            y = _ROW * (index + (place + 1) / (len(row.dots) + 1))
            tip = _tip(row.name, dot, unit=unit)
            chart.strokes.extend(_whisker(dot, scale=scale, y=y, css=dot.css, tip=tip))
            chart.marks.append(Mark(round(100 * scale(dot.value), 2), round(y, 1), dot.css, tip, 4))
    return chart


class _Scale:
    """From the span of some places to 0..1."""

    def __init__(self, places: Sequence[float], *, logarithmic: bool = False) -> None:
        self._logarithmic = logarithmic and min(places, default=0) > 0
        self._low = self._of(min(places, default=0.0))
        self._span = self._of(max(places, default=1.0)) - self._low

    def __call__(self, value: float) -> float:
        if not self._span:
            return 0.5
        return (self._of(value) - self._low) / self._span

    def _of(self, value: float) -> float:
        return math.log2(value) if self._logarithmic else value


def _rows(
    title: str, *, unit: str, rows: Sequence[Row], start: float, right: int, legend: bool
) -> tuple[_Scale, Chart]:
    """The frame of a chart of rows: names, round numbers below, a rule above the average."""
    known = [start]
    for row in rows:
        for dot in row.dots:
            known += [value for value in (dot.value, *(dot.interval or ())) if finite(value)]
    ticks = _ticks(min(known), max(known), most=4)
    scale = _Scale(ticks)
    height = float(_ROW * len(rows))
    names = {dot.css: dot.name for row in rows for dot in row.dots}
    chart = Chart(
        title=title,
        unit=unit,
        summary="; ".join(
            _tip(row.name, dot, unit=unit) for row in rows for dot in row.dots if finite(dot.value)
        ),
        height=height,
        left=12 + round(_CHARACTER * max((len(row.name) for row in rows), default=0)),
        right=right,
        legend=list(names.items()) if legend else [],
    )
    at = [(round(100 * scale(tick), 2), _tick(tick)) for tick in ticks]
    chart.grid.extend(Stroke("", [(x, 0, x, height)]) for x, _ in at)
    chart.labels.extend(_below(at, y=height + 18))
    for index, row in enumerate(rows):
        css = "name average" if row.average else "name"
        chart.labels.append(Label(0, _ROW * index + _ROW / 2 + 4, row.name, css, "end", -10))
    return scale, chart


def _whisker(dot: Dot, *, scale: _Scale, y: float, css: str, tip: str) -> list[Stroke]:
    if not dot.interval or not all(map(finite, dot.interval)):
        return []
    low, high = (round(100 * scale(end), 2) for end in dot.interval)
    ends = [(x, round(y - 3, 1), x, round(y + 3, 1)) for x in (low, high)]
    return [Stroke(css, [(low, round(y, 1), high, round(y, 1)), *ends], tip)]


def _tip(name: str, dot: Dot, *, unit: str) -> str:
    assert dot.value is not None
    text = f"{name}, {dot.name}: {exact(dot.value)} {unit}"
    if dot.interval and all(map(finite, dot.interval)):
        text += f", interval {exact(dot.interval[0])} to {exact(dot.interval[1])}"
    return text


def _known(line: Line) -> list[tuple[float, float]]:
    return [(x, y) for x, y in line.points if finite(x) and finite(y)]


def _summary(series: Sequence[Line], *, unit: str, x_name: str) -> str:
    parts = []
    for line in series:
        known = _known(line)
        if known:
            numbers = ", ".join(f"{exact(y)} at {exact(x)}" for x, y in known)
            parts.append(f"{line.name}: {numbers}")
    return f"{unit} by {x_name}. " + "; ".join(parts)


def _ticks(low: float, high: float, *, most: int = 5) -> list[float]:
    """Round numbers from at or below low to at or above high."""
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):  # no span, or one of rounding alone
        high = low + max(1.0, abs(low))
    locator = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10])
    return [float(tick) for tick in locator.tick_values(low, high)]


def _tick(value: float) -> str:
    return f"{value:,.10g}"


def _below(places: Sequence[tuple[float, str]], *, y: float) -> list[Label]:
    """Labels under an axis, without those that would touch the one before."""
    kept: list[Label] = []
    end = -math.inf
    for x, text in places:
        half = 100 * (_CHARACTER * len(text) / 2 + 3) / _NARROW
        if x - half >= end:
            kept.append(Label(x, y, text))
            end = x + half
    return kept
