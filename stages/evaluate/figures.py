"""Which charts an evaluation gives: from the bodies of its files to charts. Pure.

With the drafter is one colour throughout, plain vLLM grey, and what was before (an earlier
evaluation, uncalibrated confidence) orange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.evaluate import formulas
from stages.evaluate.charts import Chart, Dot, Interval, Line, Row, bars, dots, lines

DRAFTER, BASELINE, BEFORE = "drafter", "baseline", "before"
LATENCIES: dict[str | None, tuple[str, str]] = {
    "median": (", median", ""),
    "p95": (", 95th percentile", " dashed"),
}
NAMES = {DRAFTER: "with the drafter", BASELINE: "plain vLLM"}
MACRO = "macro average"
LENGTH, SPEEDUP = "acceptance_length", "speedup"
FEWEST_BLOCKS = 20  # of a point in a reliability diagram
UNITS = {LENGTH: "tokens a round", SPEEDUP: "× plain vLLM"}
TITLES = {LENGTH: "Acceptance length", SPEEDUP: "Speed-up of one user"}

Body = Mapping[str, Any]


def measured(metrics: Body, serving: Body, key: str) -> dict[str, tuple[float | None, Interval]]:
    """(value, interval) of `key` (LENGTH or SPEEDUP) by domain, the macro average last."""
    intervals = serving.get("intervals") or {}
    by_domain = intervals.get("domains") or {}
    details = serving.get("domains") or {}
    found = {}
    for name, domain in metrics["domains"].items():
        source = domain if key == LENGTH else details.get(name) or {}
        found[name] = (source.get(key), (by_domain.get(name) or {}).get(key))
    found[MACRO] = (metrics.get(f"macro_{key}"), intervals.get(f"macro_{key}"))
    return found


def by_domain(metrics: Body, serving: Body) -> list[Chart]:
    return [
        bars(
            TITLES[key],
            unit=UNITS[key],
            rows=[
                Row(name, [Dot(NAMES[DRAFTER], DRAFTER, value, interval)], name == MACRO)
                for name, (value, interval) in measured(metrics, serving, key).items()
            ],
            start=1.0,
        )
        for key in (LENGTH, SPEEDUP)
    ]


def survivals(metrics: Body, serving: Body) -> dict[str, list[float]]:
    """By domain, of those where a draft was made; the macro average of them last."""
    details = serving.get("domains") or {}
    found = {
        name: list(details[name]["survival"])
        for name, domain in metrics["domains"].items()
        if domain.get(LENGTH) is not None and (details.get(name) or {}).get("survival")
    }
    if found:
        positions = zip(*found.values(), strict=True)
        found[MACRO] = [formulas.mean(values) or 0.0 for values in positions]
    return found


def by_position(metrics: Body, serving: Body) -> list[Chart]:
    """Survival and conditional acceptance: a thin line a domain, the macro average thick."""
    found = survivals(metrics, serving)
    if not found:
        return []
    positions = range(1, len(found[MACRO]) + 1)

    def chart(title: str, unit: str, values: Mapping[str, Sequence[float | None]]) -> Chart:
        names = [*metrics["domains"], MACRO]
        return lines(
            title,
            unit=unit,
            x_name="draft position",
            series=[
                Line(
                    name,
                    "drafter thick" if name == MACRO else f"thin domain-{names.index(name) % 9}",
                    list(zip(positions, of_name, strict=True)),
                    radius=4 if name == MACRO else 2,
                )
                for name, of_name in values.items()
            ],
            at=positions,
            height=240,
            legend=False,
        )

    measured = {**(serving.get("domains") or {}), MACRO: serving.get("macro") or {}}
    conditional = {
        name: measured[name].get("conditional")
        # An artifact from before blocks could differ in length.
        or formulas.conditional(values, [1.0, *values[:-1]])
        for name, values in found.items()
    }
    return [
        chart("Survival", "share of drafts accepted up to here", found),
        chart("Conditional acceptance", "share accepted of those that got here", conditional),
    ]


def position_legend(metrics: Body, serving: Body) -> list[tuple[str, str]]:
    names = [*metrics["domains"], MACRO]
    return [
        ("drafter thick" if name == MACRO else f"thin domain-{names.index(name) % 9}", name)
        for name in survivals(metrics, serving)
    ]


def load(full: Body) -> list[Chart]:
    """Throughput, first token and time between tokens against concurrency, on both engines."""
    levels = sorted((full.get("load") or {}).items(), key=lambda item: int(item[0]))
    if not levels:
        return []
    at = [int(level) for level, _ in levels]

    def of(engine: str, key: str, statistic: str | None, scale: float) -> list[tuple[int, Any]]:
        points = []
        for level, engines in levels:
            value = (engines.get(engine) or {}).get(key)
            if statistic is not None:
                value = (value or {}).get(statistic)
            points.append((int(level), None if value is None else value * scale))
        return points

    def chart(title: str, unit: str, key: str, *, latency: bool, scale: float = 1) -> Chart:
        kinds = LATENCIES if latency else {None: ("", "")}
        return lines(
            title,
            unit=unit,
            x_name="requests at once",
            series=[
                Line(NAMES[engine] + words, engine + css, of(engine, key, statistic, scale))
                for engine in NAMES
                for statistic, (words, css) in kinds.items()
            ],
            at=at,
            logarithmic=True,
            legend=False,
        )

    return [
        chart("Throughput", "tokens/s, all requests together", "tokens_per_s", latency=False),
        chart("First token", "s", "first_token_s", latency=True),
        chart("Between two tokens", "ms", "inter_token_s", latency=True, scale=1000),
    ]


def pareto(full: Body) -> list[Chart]:
    """What one user sees against what the server gives; the matched ratio that is best is drawn."""
    points = (full.get("pareto") or {}).get("points") or {}
    series = []
    for engine in (BASELINE, DRAFTER):
        kept = sorted(points.get(engine) or [], key=lambda point: point["concurrency"])
        series.append(
            Line(
                NAMES[engine],
                engine,
                [(point["interactivity"], point["throughput"]) for point in kept],
                notes=[f"{point['concurrency']} at once" for point in kept],
                captions=[str(point["concurrency"]) for point in kept],
                captions_below=engine == BASELINE,
            )
        )
    if not any(line.points for line in series):
        return []
    matched = best_match(full)
    if matched is not None and matched["ratio"] is not None:
        ends = [(matched["interactivity"], matched[engine]) for engine in (BASELINE, DRAFTER)]
        name = f"same speed a user, {matched['ratio']:.2f}× the throughput"
        series.append(Line(name, "matched dashed", ends, radius=0))
    return [
        lines(
            "Throughput against the speed of one user",
            unit="tokens/s, all requests together",
            x_name="tokens/s of one user",
            series=series,
            height=280,
        )
    ]


def best_match(full: Body) -> dict[str, Any] | None:
    """The matched point whose ratio the file calls the best."""
    body = full.get("pareto") or {}
    for matched in body.get("matched") or []:
        if matched["interactivity"] == body.get("at_interactivity"):
            return dict(matched)
    return None


def context(full: Body) -> list[Chart]:
    rows = sorted(full.get("context") or [], key=lambda row: row["prompt_tokens"])
    if not rows:
        return []

    def chart(title: str, unit: str, keys: Mapping[str, str], reference: float | None) -> Chart:
        return lines(
            title,
            unit=unit,
            x_name="prompt tokens",
            series=[
                Line(
                    NAMES[engine],
                    engine,
                    [(row["prompt_tokens"], row.get(key)) for row in rows],
                    notes=[f"{row['prompts']} prompts" for row in rows],
                )
                for engine, key in keys.items()
            ],
            low=0.0 if reference is None else None,
            reference=reference,
            at=[row["prompt_tokens"] for row in rows],
            logarithmic=True,
            legend=False,
        )

    speeds = {engine: f"{engine}_tokens_per_s" for engine in NAMES}
    return [
        chart(TITLES[LENGTH], UNITS[LENGTH], {DRAFTER: LENGTH}, 1.0),
        chart("Speed of one user", "tokens/s", speeds, None),
        chart(TITLES[SPEEDUP], UNITS[SPEEDUP], {DRAFTER: SPEEDUP}, 1.0),
    ]


def sampled(metrics: Body, serving: Body, body: Body) -> list[Chart]:
    greedy = measured(metrics, serving, LENGTH)
    domains = body.get("domains") or {}
    drawn: dict[str, float | None] = {
        name: (domains.get(name) or {}).get(LENGTH) for name in metrics["domains"]
    }
    drawn[MACRO] = body.get("macro_acceptance_length")
    rows = [
        Row(
            name,
            [
                Dot("greedy", "drafter dot", *greedy[name]),
                Dot(f"temperature {body.get('temperature', 1):g}", "drafter hollow", drawn[name]),
            ],
            name == MACRO,
        )
        for name in greedy
    ]
    return [dots(TITLES[LENGTH], unit=UNITS[LENGTH], rows=rows, start=1.0)]


def reliability(calibration: Body) -> list[Chart]:
    """A square a slot: how often drafts were accepted at each stated confidence; bands of fewer
    than FEWEST_BLOCKS are chance and left out."""

    def points(slot: Body, which: str) -> list[Body]:
        return [band for band in slot[which]["reliability"] if band["blocks"] >= FEWEST_BLOCKS]

    return [
        lines(
            f"Slot {slot['slot']}",
            unit="share accepted",
            x_name="confidence",
            series=[
                Line(
                    name,
                    css,
                    [(band["confidence"], band["accepted"]) for band in points(slot, which)],
                    notes=[f"{band['blocks']:,} blocks" for band in points(slot, which)],
                    radius=3,
                )
                for which, css, name in (
                    ("before", BEFORE, "before"),
                    ("after", DRAFTER, "after calibration"),
                )
            ],
            low=0.0,
            high=1.0,
            at=[0.0, 0.5, 1.0],
            diagonal=True,
            height=150,
            legend=False,
        )
        for slot in calibration.get("slots") or []
    ]


def compared(now: tuple[Body, Body], earlier: tuple[Body, Body]) -> list[Chart]:
    """Both evaluations with their intervals; each a pair of metrics and serving."""
    charts = []
    for key in (LENGTH, SPEEDUP):
        new, old = measured(*now, key), measured(*earlier, key)
        rows = [
            Row(
                name,
                [
                    Dot("earlier", "before dot", *old.get(name, (None, None))),
                    Dot("this one", "drafter dot", *new[name]),
                ],
                name == MACRO,
            )
            for name in new
        ]
        charts.append(dots(TITLES[key], unit=UNITS[key], rows=rows, start=1.0))
    return charts
