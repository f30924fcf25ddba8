"""Two plots: acceptance by domain and by position. Files only; no display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

# The object interface: pyplot would pick a backend and keep global state.
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREY = "#2f6f9f", "#d9822b", "#b8c4ce"
_METADATA = {"Software": ""}  # matplotlib's version would change the file's checksum


def acceptance_by_domain(
    lengths: Mapping[str, float | None], *, macro: float | None, block_size: int, path: Path
) -> None:
    """Bars of the acceptance length of each domain, the macro average as a line."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    names = list(lengths)
    values = [value if value is not None else 0.0 for value in lengths.values()]
    bars = axes.barh(names, values, color=_BLUE, height=0.68)
    labels = [f"{v:.2f}" if v is not None else "no drafts" for v in lengths.values()]
    axes.bar_label(bars, labels=labels, padding=4, fontsize=9)
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
