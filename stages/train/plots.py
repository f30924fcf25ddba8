"""The training curves as one picture: macro averages, domains and positions over steps. Files only;
no display is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The object interface: pyplot would pick a backend and keep global state.
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stages.train.curves import NAMES, Row

_COLOURS = ("#8a8a8a", "#2f6f9f", "#d9822b")
_LABELS = ("training samples, expected", "held-out, expected", "held-out, greedy replay")
_METADATA = {"Software": ""}  # matplotlib's version would change the file's checksum


def training_curves(
    curve: Sequence[Row], *, domains: Sequence[str], num_slots: int, path: Path
) -> None:
    """curve: the rows of curve.csv. Domains without a sample have no line."""
    figure = Figure(figsize=(15.0, 5.6), layout="constrained")
    macro, by_domain, by_position = figure.subplots(1, 3)
    for name, colour, label in zip(NAMES, _COLOURS, _LABELS, strict=True):
        length = f"{name}_acceptance_length"
        _line(macro, curve, length, color=colour, label=label, marker="o")
        label = f"{label}, without looping"
        plain = {"color": colour, "label": label, "linestyle": "--", "linewidth": 1.0}
        _line(macro, curve, f"{length}_without_looping", **plain)
    for index, domain in enumerate(domains):
        colour = f"C{index}"
        held_out = {"color": colour, "label": domain}
        _line(by_domain, curve, f"validation_acceptance_length/{domain}", **held_out)
        train = {"color": colour, "linestyle": ":", "linewidth": 1.0}
        _line(by_domain, curve, f"train_acceptance_length/{domain}", **train)
    for k in range(1, num_slots + 1):
        colour = f"C{k - 1}"
        conditional = {"color": colour, "label": f"position {k}"}
        _line(by_position, curve, f"validation_conditional/{k}", **conditional)
        train = {"color": colour, "linestyle": ":", "linewidth": 1.0}
        _line(by_position, curve, f"train_conditional/{k}", **train)
    titles = {
        macro: "Acceptance length, macro average",
        by_domain: "Expected acceptance length (dotted: training)",
        by_position: "Conditional acceptance (dotted: training)",
    }
    for axes, title in titles.items():
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#b8c4ce", alpha=0.5, linewidth=0.6)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
        axes.legend(frameon=False, fontsize=7, ncols=2, **below)
    FigureCanvasAgg(figure).print_png(path, metadata=_METADATA)


def _line(axes: Any, curve: Sequence[Row], name: str, **style: Any) -> None:
    points = [(row["step"], value) for row in curve if (value := row[name]) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **{"linewidth": 1.8, **style})
