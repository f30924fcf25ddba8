"""The results table, a pure function of evaluation/metrics.json. No torch: flows print it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADER = ("domain", "acceptance length", "tokens/s with", "tokens/s without", "speed-up")
_MACRO = "macro average"


def format_summary(metrics: Mapping[str, Any]) -> str:
    """Nine domains and the macro averages, then in words what a reader must not miss.

    Speeds are medians of one user. A domain's speed-up is the median of the ratios on paired
    prompts, not the quotient of the two medians; the macro average is their geometric mean.
    """
    rows = [
        (
            name,
            _number(domain["acceptance_length"], 2),
            _number(domain["tokens_per_s_per_user"], 1),
            _number(domain["baseline_tokens_per_s_per_user"], 1),
            _factor(domain["speedup"]),
        )
        for name, domain in metrics["domains"].items()
    ]
    macro = (
        _MACRO,
        _number(metrics["macro_acceptance_length"], 2),
        "",
        "",
        _factor(metrics["macro_speedup"]),
    )
    table = [HEADER, *rows, macro]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    rule = "  ".join("-" * width for width in widths)
    lines = [_line(HEADER, widths), rule, *(_line(row, widths) for row in rows), rule]
    return "\n".join([*lines, _line(macro, widths), *_remarks(metrics)])


def behind(ratio: float | None) -> bool:
    """Whether the ratio is below one as it is printed."""
    return ratio is not None and round(ratio, 2) < 1


def _remarks(metrics: Mapping[str, Any]) -> list[str]:
    domains: Mapping[str, Any] = metrics["domains"]
    ratios = {name: domain["speedup"] for name, domain in domains.items()}
    slower = [f"{name} ({ratio:.2f}x)" for name, ratio in ratios.items() if behind(ratio)]
    unmeasured = [name for name, ratio in ratios.items() if ratio is None]
    macro, lossless = metrics["macro_speedup"], metrics["lossless"]
    remarks = []
    if behind(macro):
        remarks.append(
            f"Single-stream speed with the drafter is BELOW the plain engine's: {macro:.2f}x."
        )
    if slower:
        remarks.append(f"Single-stream speed is below 1.0x in: {', '.join(slower)}.")
    if unmeasured:
        remarks.append(
            "Speed not measured, and left out of the macro average (responses too short): "
            f"{', '.join(unmeasured)}."
        )
    remarks += _full_depth(metrics.get("full") or {})
    remarks.append(
        f"Lossless (greedy, float32): {lossless['identical']} of {lossless['checked']} responses "
        "identical with and without the drafter."
    )
    return remarks


def _full_depth(full: Mapping[str, Any]) -> list[str]:
    """Load, matched interactivity and context, a line each; nothing at core depth."""
    remarks = []
    loads = _by_number(full, "throughput_c")
    if loads:
        baseline = _by_number(full, "baseline_throughput_c")
        cells = [f"{c}: {_number(x, 0)}/{_number(baseline.get(c), 0)}" for c, x in loads.items()]
        remarks.append(
            f"Tokens/s with/without the drafter by requests at once: {', '.join(cells)}."
        )
    if full.get("matched_interactivity_ratio") is not None:
        remarks.append(
            f"Throughput at matched interactivity: {_factor(full['matched_interactivity_ratio'])} "
            f"at {_number(full['matched_interactivity'], 1)} tokens/s a user."
        )
    lengths = _by_number(full, "acceptance_length_context_")
    if lengths:
        speedups = _by_number(full, "speedup_context_")
        cells = [f"{n}: {_number(x, 2)}, {_factor(speedups.get(n))}" for n, x in lengths.items()]
        remarks.append(f"Acceptance length and speed-up by prompt tokens: {'; '.join(cells)}.")
    return remarks


def _by_number(full: Mapping[str, Any], stem: str) -> dict[int, float | None]:
    found = {k.removeprefix(stem): v for k, v in full.items() if k.startswith(stem)}
    return {int(k): found[k] for k in sorted(found, key=int)}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    first, *rest = row
    cells = [first.ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
    return "  ".join(cells).rstrip()
