"""evaluation/report.html: one self-contained page, a pure function of the evaluation's numbers.

    python -m stages.evaluate.report EVALUATION [--package DIR] [--compare DIR] --out FILE

renders it again without measuring. The page holds no script, loads nothing and names no time: the
same numbers give the same bytes. Sections of what was not measured say so in a line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from stages.evaluate import comparison, figures, tables
from stages.evaluate.charts import Chart, Interval, finite
from stages.evaluate.figures import LENGTH, SPEEDUP, Body
from stages.evaluate.tables import Table
from stages.summary import behind

DASH = "–"  # what was not measured
MINUS = "−"
ENGINES = [(engine, name) for engine, name in figures.NAMES.items()]
Evaluation = tuple[str, Body, Body]
"""(name, metrics, serving) of an earlier evaluation."""


@dataclass(frozen=True)
class Tile:
    name: str
    value: str
    about: str
    interval: Interval = None
    bad: bool = False


@dataclass(frozen=True)
class Chapter:
    """Charts, then tables by name; `missing` says why there are none."""

    title: str
    about: str
    missing: str = ""
    lead: Sequence[str] = ()
    legend: Sequence[tuple[str, str]] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[tuple[str, Table]] = ()
    unfolded: bool = False  # the tables
    small: bool = False  # the charts

    @property
    def beside(self) -> bool:
        """One chart and one table fill a line together."""
        return self.unfolded and len(self.charts) == len(self.filled) == 1

    @property
    def filled(self) -> list[tuple[str, Table]]:
        return [(name, table) for name, table in self.tables if table.rows]


def render(
    *,
    metrics: Body,
    serving: Body,
    calibration: Body | None = None,
    earlier: Evaluation | None = None,
) -> str:
    """The page. metrics, serving: the bodies of metrics.json and serving.json, of any depth and
    age; calibration: the package's calibration.json."""
    full = serving.get("full") or {}
    page: str = _template().render(
        package=serving.get("package") or "drafter",
        target=serving.get("target"),
        block_size=(serving.get("settings") or {}).get("block_size"),
        tiles=_tiles(metrics, serving),
        remarks=[*(serving.get("warnings") or []), *(serving.get("notes") or [])],
        num_warnings=len(serving.get("warnings") or []),
        chapters=[
            _domains(metrics, serving),
            _positions(metrics, serving),
            *_full(metrics, serving, full),
            _calibration(calibration),
            *([] if earlier is None else [_compared((metrics, serving), earlier)]),
        ],
        environment=tables.settings(serving.get("environment") or {}),
        settings=tables.settings(serving.get("settings") or {}),
    )
    return page.strip() + "\n"


def _tiles(metrics: Body, serving: Body) -> list[Tile]:
    intervals = serving.get("intervals") or {}
    lossless, speedup = metrics["lossless"], metrics.get("macro_speedup")
    tiles = [
        Tile(
            "acceptance length",
            shown(metrics.get("macro_acceptance_length"), 2),
            "tokens a round, the target's own included; mean of the domains",
            interval=intervals.get("macro_acceptance_length"),
        ),
        Tile(
            "speed-up of one user",
            shown(speedup, 2, "×"),
            "against plain vLLM; geometric mean of the domains",
            interval=intervals.get("macro_speedup"),
            bad=behind(speedup),
        ),
        Tile(
            "lossless",
            f"{lossless['identical']} of {lossless['checked']}",
            "responses identical with and without the drafter (greedy, float32)",
            bad=lossless["identical"] < lossless["checked"],
        ),
    ]
    rounds = metrics.get("macro_tokens_per_round")
    if rounds is not None:
        about = "over all rounds, those without a draft too"
        tiles.insert(2, Tile("tokens a round", shown(rounds, 2), about))
    if serving.get("full"):
        body = serving["full"].get("pareto") or {}
        at = body.get("at_interactivity")
        about = "of plain vLLM's at the same speed of one user"
        if finite(at):
            about += f", {shown(at, 1)} tokens/s"
        tiles.append(Tile("throughput, at best", shown(body.get("best_ratio"), 2, "×"), about))
    return tiles


def _domains(metrics: Body, serving: Body) -> Chapter:
    return Chapter(
        "Nine domains",
        "Bars start where drafting gains nothing: at one token a round, and at plain vLLM's speed. "
        + ("Thin lines are intervals." if serving.get("intervals") else ""),
        charts=figures.by_domain(metrics, serving),
        tables=[
            ("Acceptance in numbers", tables.acceptance(metrics, serving)),
            ("Speed in numbers, one user", tables.speed(metrics, serving)),
        ],
        unfolded=True,
    )


def _positions(metrics: Body, serving: Body) -> Chapter:
    return Chapter(
        "Acceptance by draft position",
        "Acceptance length is one and the sum of survival. Conditional acceptance has a gap where "
        "no draft got so far.",
        missing="No draft was made.",
        charts=figures.by_position(metrics, serving),
        legend=figures.position_legend(metrics, serving),
        tables=[("Survival in numbers", tables.positions(metrics, serving))],
    )


def _full(metrics: Body, serving: Body, full: Body) -> list[Chapter]:
    later = "Not measured here; make evaluate-full measures it."
    drawn = full.get("sampled") or {}
    source = full.get("context_source")
    return [
        Chapter(
            "Under load",
            "Every request at once is a user of its own. Solid: median; dashed: 95th percentile.",
            missing=later,
            legend=ENGINES,
            charts=figures.load(full),
            tables=[("Load in numbers", tables.load(full))],
        ),
        Chapter(
            "Throughput against speed",
            "Numbers beside the points are requests at once; up and to the right is better.",
            missing=later,
            charts=figures.pareto(full),
            tables=[("At the same speed of one user", tables.matched(full))],
            unfolded=True,
        ),
        Chapter(
            "Longer prompts",
            f"Prompts: {source}. One user." if source else "One user.",
            missing=later,
            legend=ENGINES,
            charts=figures.context(full),
            tables=[("Longer prompts in numbers", tables.context(full))],
        ),
        Chapter(
            "Sampled against greedy",
            "The same prompts, sampled and greedy.",
            missing=later,
            charts=figures.sampled(metrics, serving, drawn) if drawn else (),
            tables=[("Acceptance length in numbers", tables.sampled(metrics, serving, drawn))]
            if drawn
            else (),
            unfolded=True,
        ),
    ]


def _calibration(body: Body | None) -> Chapter:
    missing = "The package holds no calibration.json."
    if body is not None:
        missing = "The package's calibration.json holds no slot."
    body = body or {}
    return Chapter(
        "Confidence",
        f"How often the first drafts were accepted at each stated confidence ({body.get('method')},"
        f" {body.get('blocks', 0):,} blocks of {body.get('samples', 0):,} held-out responses). On "
        "the diagonal the confidence is right; points of fewer than "
        f"{figures.FEWEST_BLOCKS} blocks are left out. ECE: expected calibration error, 0 is "
        "perfect; AUC: how well it ranks, 1 is perfect.",
        missing=missing,
        charts=figures.reliability(body),
        legend=[(figures.BEFORE, "before"), (figures.DRAFTER, "after calibration")],
        small=True,
        tables=[("Calibration by slot", tables.calibration(body))],
        unfolded=True,
    )


def _compared(now: tuple[Body, Body], earlier: Evaluation) -> Chapter:
    name, *before = earlier
    both = (now, (before[0], before[1]))
    changes = comparison.changed(now[1], before[1])
    return Chapter(
        f"Against {name}",
        "Where intervals overlap, a difference is within noise: do not read it as a gain. "
        + ("" if changes.rows else "No setting and nothing of the environment differs."),
        charts=figures.compared(*both),
        lead=comparison.headline(*both),
        tables=[
            *(
                (f"{figures.TITLES[key]} compared", comparison.differences(*both, key=key))
                for key in (LENGTH, SPEEDUP)
            ),
            ("Settings and environment that differ", changes),
        ],
        unfolded=True,
    )


def shown(value: Any, digits: int, suffix: str = "", *, signed: bool = False) -> str:
    """A number for reading: `digits` behind the point, or a dash where there is none."""
    if isinstance(value, str):
        return value
    if value is None or not math.isfinite(value):
        return DASH
    if isinstance(value, int):
        return f"{value:,}{suffix}".replace("-", MINUS)
    text = f"{value:z,.{digits}f}"  # z: no minus before what rounds to zero
    plus = "+" if signed and value > 0 and text.strip("0.,") else ""
    return f"{plus}{text}{suffix}".replace("-", MINUS)


def span(interval: Interval, digits: int) -> str:
    """An interval for reading, empty where there is none."""
    if not interval or not all(map(finite, interval)):
        return ""
    return f"{interval[0]:,.{digits}f} {DASH} {interval[1]:,.{digits}f}"


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("stages.evaluate", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: DASH if value is None else value,
    )
    environment.filters |= {"shown": shown, "span": span}
    return environment.get_template("report.html.j2")


def read_evaluation(folder: Path) -> tuple[Body, Body]:
    """(metrics, serving) of an evaluation's folder. Raises ValueError for one that lacks them."""
    bodies = []
    for name in ("metrics.json", "serving.json"):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: no such file; expected an evaluation's folder")
        bodies.append(_read(path))
    return bodies[0], bodies[1]


def read_calibration(package: Path) -> Body | None:
    path = package / "calibration.json"
    return _read(path) if path.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"{path}: expected a mapping, found {type(body).__name__}")
    return body


def write(
    out: Path, *, evaluation: Path, package: Path | None = None, compare_with: Path | None = None
) -> None:
    """Renders the page of a folder of metrics.json and serving.json. package may hold
    calibration.json; compare_with is another such folder. Raises ValueError as read_evaluation."""
    metrics, serving = read_evaluation(evaluation)
    page = render(
        metrics=metrics,
        serving=serving,
        calibration=None if package is None else read_calibration(package),
        earlier=None
        if compare_with is None
        else (str(compare_with), *read_evaluation(compare_with)),
    )
    out.write_text(page)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.evaluate.report")
    parser.add_argument("evaluation", type=Path, help="folder of metrics.json and serving.json")
    parser.add_argument("--package", type=Path, help="folder that may hold calibration.json")
    parser.add_argument("--compare", type=Path, help="folder of an earlier evaluation")
    parser.add_argument("--out", type=Path, required=True, help="the page")
    given = parser.parse_args(arguments)
    try:
        write(
            given.out,
            evaluation=given.evaluation,
            package=given.package,
            compare_with=given.compare,
        )
    except (ValueError, OSError) as error:
        parser.exit(1, f"report: error: {error}\n")


if __name__ == "__main__":
    main()
