"""The report's tables: every number that a chart shows, and those that none shows. Pure.

A cell holds the number itself; report.html.j2 writes it exactly beside what is shown, so that a
table can be read back. What was not measured is None. A column that nobody has is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.evaluate import figures
from stages.evaluate.charts import Interval
from stages.evaluate.figures import BASELINE, DRAFTER, LENGTH, MACRO, SPEEDUP, Body
from stages.nested import flatten


@dataclass(frozen=True)
class Cell:
    value: Any
    digits: int = 2
    suffix: str = ""
    interval: Interval = None
    css: str = ""


@dataclass(frozen=True)
class Table:
    header: list[str]
    rows: list[list[Cell]]
    css: str = ""

    @property
    def words(self) -> set[int]:
        """The columns that hold words, counted from 1."""
        return {
            index
            for row in self.rows
            for index, cell in enumerate(row, start=1)
            if isinstance(cell.value, str) and cell.value
        }


_NONE = Cell("")  # a macro average that has no meaning


def _table(columns: Mapping[str, Sequence[Cell]], *, css: str = "") -> Table:
    """From cells by column; the first column names the rows."""
    names, *rest = columns.items()
    kept = dict([names, *(c for c in rest if any(cell.value not in (None, "") for cell in c[1]))])
    return Table(list(kept), [list(row) for row in zip(*kept.values(), strict=True)], css)


def _column(
    bodies: Iterable[Body], key: str, digits: int = 2, suffix: str = "", *, scale: float = 1
) -> list[Cell]:
    values = (body.get(key) for body in bodies)
    return [Cell(None if value is None else value * scale, digits, suffix) for value in values]


def _names(names: Sequence[str]) -> list[Cell]:
    return [Cell(name, css="average" if name == MACRO else "") for name in names]


def acceptance(metrics: Body, serving: Body) -> Table:
    """What each domain accepted of how much, the macro averages last."""
    lengths = figures.measured(metrics, serving, LENGTH)
    bodies = _bodies(metrics, serving)

    def column(key: str, digits: int = 2, scale: float = 1) -> list[Cell]:
        average = Cell(metrics[f"macro_{key}"], digits) if f"macro_{key}" in metrics else _NONE
        return [*_column(bodies.values(), key, digits, scale=scale), average]

    return _table(
        {
            "domain": _names(list(lengths)),
            "acceptance length (tokens a round)": [Cell(v, 2, "", i) for v, i in lengths.values()],
            "without looping responses": column("acceptance_length_without_looping"),
            "tokens a round, all rounds": column("tokens_per_round"),
            "prompts": column("prompts"),
            "drafts (rounds)": column("drafts"),
            "accepted tokens": column("accepted"),
            "looping responses": column("looping"),
            "tokens that cannot be drafted (%)": column("out_of_vocabulary", 1, 100),
        },
        css="wide",
    )


def speed(metrics: Body, serving: Body) -> Table:
    """How fast one user is served in each domain, the macro average last."""
    speedups = figures.measured(metrics, serving, SPEEDUP)
    bodies = _bodies(metrics, serving)

    def column(key: str, digits: int = 2) -> list[Cell]:
        return [*_column(bodies.values(), key, digits), _NONE]

    def first_token(engine: str) -> list[Cell]:
        firsts = [body.get("first_token_s") or {} for body in bodies.values()]
        return [*_column(firsts, engine, 3), _NONE]

    return _table(
        {
            "domain": _names(list(speedups)),
            "speed-up": [Cell(v, 2, "×", i) for v, i in speedups.values()],
            "tokens/s with the drafter": column("tokens_per_s_per_user", 1),
            "tokens/s, plain vLLM": column("baseline_tokens_per_s_per_user", 1),
            "first token with the drafter (s)": first_token(DRAFTER),
            "first token, plain vLLM (s)": first_token(BASELINE),
            "prompts timed on both": column("speed_pairs"),
        },
        css="wide",
    )


def _bodies(metrics: Body, serving: Body) -> dict[str, Body]:
    details = serving.get("domains") or {}
    return {
        name: {**domain, **(details.get(name) or {})} for name, domain in metrics["domains"].items()
    }


def positions(metrics: Body, serving: Body) -> Table:
    """Survival by domain (a row) and draft position (a column)."""
    found = figures.survivals(metrics, serving)
    num = len(found.get(MACRO, ()))
    columns = {f"position {k + 1}": [Cell(v[k], 3) for v in found.values()] for k in range(num)}
    return _table({"survival": _names(list(found)), **columns})


def load(full: Body) -> Table:
    """A row for each concurrency and engine."""
    levels = sorted((full.get("load") or {}).items(), key=lambda item: int(item[0]))
    rows = [
        (int(level), engine, engines[engine])
        for level, engines in levels
        for engine in (DRAFTER, BASELINE)
        if engines.get(engine)
    ]

    def column(key: str, digits: int = 2) -> list[Cell]:
        return _column((body for _, _, body in rows), key, digits)

    def latency(key: str, statistic: str, digits: int, scale: float = 1) -> list[Cell]:
        return _column((body.get(key) or {} for _, _, body in rows), statistic, digits, scale=scale)

    return _table(
        {
            "requests at once": [Cell(level) for level, _, _ in rows],
            "engine": [Cell(figures.NAMES[engine]) for _, engine, _ in rows],
            "tokens/s together": column("tokens_per_s", 1),
            "tokens/s of one user": column("tokens_per_s_per_user", 1),
            "first token, median (s)": latency("first_token_s", "median", 3),
            "first token, 95th percentile (s)": latency("first_token_s", "p95", 3),
            "between tokens, median (ms)": latency("inter_token_s", "median", 1, 1000),
            "between tokens, 95th percentile (ms)": latency("inter_token_s", "p95", 1, 1000),
            "acceptance length": column("acceptance_length"),
            "tokens a round": column("tokens_per_round"),
            "requests": column("requests"),
            "failed": column("failed"),
            "output tokens": column("output_tokens"),
            "elapsed (s)": column("elapsed_s", 1),
        }
    )


def matched(full: Body) -> Table:
    """Throughput of both engines at the same speed of one user."""
    rows = (full.get("pareto") or {}).get("matched") or []
    return _table(
        {
            "tokens/s of one user": _column(rows, "interactivity", 1),
            "tokens/s together, with the drafter": _column(rows, DRAFTER, 1),
            "tokens/s together, plain vLLM": _column(rows, BASELINE, 1),
            "ratio": _column(rows, "ratio", 2, "×"),
        }
    )


def context(full: Body) -> Table:
    rows = sorted(full.get("context") or [], key=lambda row: row["prompt_tokens"])

    return _table(
        {
            "prompt tokens": _column(rows, "prompt_tokens"),
            "prompts": _column(rows, "prompts"),
            "acceptance length": _column(rows, LENGTH),
            "tokens a round": _column(rows, "tokens_per_round"),
            "tokens/s with the drafter": _column(rows, "drafter_tokens_per_s", 1),
            "tokens/s of plain vLLM": _column(rows, "baseline_tokens_per_s", 1),
            "speed-up": _column(rows, SPEEDUP, 2, "×"),
        }
    )


def sampled(metrics: Body, serving: Body, body: Body) -> Table:
    greedy = figures.measured(metrics, serving, LENGTH)
    drawn = dict(body.get("domains") or {})
    drawn[MACRO] = {LENGTH: body.get("macro_acceptance_length")}
    rows = [drawn.get(name) or {} for name in greedy]
    return _table(
        {
            "domain": _names(list(greedy)),
            "greedy": [Cell(v, 2, "", i) for v, i in greedy.values()],
            "sampled": [Cell(row.get(LENGTH)) for row in rows],
            "sampled, tokens a round": [*_column(rows[:-1], "tokens_per_round"), _NONE],
            "prompts": [*_column(rows[:-1], "prompts"), _NONE],
        }
    )


def calibration(body: Body) -> Table:
    slots = body.get("slots") or []

    before, after = ([slot[which] for slot in slots] for which in ("before", "after"))
    return _table(
        {
            "slot": _column(slots, "slot"),
            "temperature": _column(slots, "temperature", 3),
            "kept": [Cell("yes" if slot["kept"] else "no") for slot in slots],
            "blocks": _column(slots, "blocks"),
            "ECE before": _column(before, "ece", 3),
            "ECE after": _column(after, "ece", 3),
            "AUC before": _column(before, "auc", 3),
            "AUC after": _column(after, "auc", 3),
        }
    )


def settings(body: Body) -> Table:
    """Every leaf of nested settings under its dotted key, as params.yaml writes it."""
    leaves = list(flatten(body))
    return Table(
        ["setting", "value"],
        [[Cell(key), Cell(written(value))] for key, value in leaves],
        "settings",
    )


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
