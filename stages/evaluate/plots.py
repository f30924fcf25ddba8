"""Two plots: acceptance by domain and by position. Files only; no display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

# The object interface: pyplot would pick a backend and keep global state.
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_BLUE, _LIGHT, _ORANGE, _GREY = "#2f6f9f", "#9cc3dd", "#d9822b", "#b8c4ce"
_METADATA = {"Software": ""}  # matplotlib's version would change the file's checksum


def acceptance_by_domain(
    lengths: Mapping[str, float | None],
    without_looping: Mapping[str, float | None],
    *,
    macro: float | None,
    block_size: int,
    path: Path,
) -> None:
    """Bars of the acceptance length of each domain, over all responses and over those that do not
    repeat themselves; the macro average of all as a line."""
    figure = Figure(figsize=(8.0, 5.6), layout="constrained")
    axes = figure.add_subplot()
    names = list(lengths)
    kinds = (("all responses", lengths, _BLUE), ("without looping", without_looping, _LIGHT))
    values = []
    for place, (label, given, colour) in enumerate(kinds):
        heights = [given[name] or 0.0 for name in names]
        values += heights
        offsets = [index + (place - 0.5) * 0.4 for index in range(len(names))]
        bars = axes.barh(offsets, heights, color=colour, height=0.38, label=label)
        texts = [f"{v:.2f}" if (v := given[name]) is not None else "no drafts" for name in names]
        axes.bar_label(bars, labels=texts, padding=4, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    if macro is not None:
        axes.axvline(macro, color=_ORANGE, linewidth=1.8, label=f"macro average {macro:.2f}")
    axes.legend(loc="lower right", frameon=False)
    axes.invert_yaxis()
    axes.set_xlim(1.0, max([*values, 1.5]) * 1.12)
    axes.set_xlabel("acceptance length (tokens a round, bonus included)")
    axes.set_title(f"Acceptance by domain, block of {block_size}", loc="left", fontsize=12)
    _finish(axes, grid="x")
    FigureCanvasAgg(figure).print_png(path, metadata=_METADATA)


def acceptance_by_position(
    survivals: Mapping[str, Sequence[float]], *, macro: Sequence[float], path: Path
) -> None:
    """Survival of each draft position: a line a domain, the macro average on top."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    positions = range(1, len(macro) + 1)
    for index, (name, values) in enumerate(survivals.items()):
        colour = f"C{index}"
        axes.plot(positions, values, color=colour, alpha=0.55, linewidth=1.2, label=name)
    axes.plot(positions, macro, color="black", linewidth=2.6, marker="o", label="macro average")
    axes.set_xticks(list(positions))
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("draft position")
    axes.set_ylabel("survival (share of drafts accepted up to here)")
    axes.set_title("Acceptance by position", loc="left", fontsize=12)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    _finish(axes, grid="both")
    FigureCanvasAgg(figure).print_png(path, metadata=_METADATA)


def _finish(axes: object, *, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)  # type: ignore[attr-defined]
    axes.grid(axis=grid, color=_GREY, alpha=0.5, linewidth=0.6)  # type: ignore[attr-defined]
    axes.set_axisbelow(True)  # type: ignore[attr-defined]
