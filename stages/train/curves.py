"""The names of what is measured while training: the columns of curve.csv, metrics.json, and thereby
the metrics in MLflow (train/<column>). Pure; every run has the same names.

    train_acceptance_length                        expected, macro average over domains
    validation_acceptance_length                   the same on held-out samples; selects the best
    validation_greedy_acceptance_length            speculative decoding replayed over responses
    <the three>_without_looping                    only responses that do not repeat themselves;
                                                   a domain of loops alone drops out of the average
    <the three>/<domain>
    <train|validation|validation_greedy>_survival/<position>      unconditional, macro; from 1
    <train|validation|validation_greedy>_conditional/<position>   of those that got there
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stages.train.validation import Tally, Validation

SELECTED_BY = "validation_acceptance_length"
"""What makes a checkpoint the best: held-out, and macro as evaluation reports it, so that a domain
of long responses does not decide alone; expected, as it varies less than counts of matches do."""

NAMES = ("train", "validation", "validation_greedy")
Row = dict[str, float | None]  # None: nothing to measure


def curve_row(validation: Validation, *, domains: Sequence[str], min_blocks: int) -> Row:
    """One validation's columns."""
    measured = (validation.train, validation.held_out, validation.replayed)
    tallies = dict(zip(NAMES, measured, strict=True))
    row: Row = {"validation_loss": validation.loss}
    for name, tally in tallies.items():
        row |= lengths(name, tally, min_blocks=min_blocks)
    for name, tally in tallies.items():
        for index, domain in enumerate(domains):
            row[f"{name}_acceptance_length/{domain}"] = tally.length(index)
    for name, tally in tallies.items():
        survival = tally.macro_survival(min_blocks=min_blocks)
        num_slots = tally.survival.shape[-1]
        for kind, values in zip(
            ("survival", "conditional"), _positions(survival, num_slots), strict=True
        ):
            row |= {f"{name}_{kind}/{k}": value for k, value in enumerate(values, start=1)}
    return row


def lengths(name: str, tally: Tally, *, min_blocks: int) -> Row:
    """A tally's macro acceptance length, with and without looping responses."""
    return {
        f"{name}_acceptance_length": tally.macro(min_blocks=min_blocks),
        f"{name}_acceptance_length_without_looping": tally.without_looping().macro(
            min_blocks=min_blocks
        ),
    }


def domain_metrics(tally: Tally, *, domains: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A replay by domain, for metrics.json; domains without a round are left out."""
    plain = tally.without_looping()
    return {
        domain: {
            "drafts": int(tally.blocks[index, :, 0].sum()),
            "acceptance_length": length,
            "acceptance_length_without_looping": plain.length(index),
        }
        for index, domain in enumerate(domains)
        if (length := tally.length(index)) is not None
    }


def position_metrics(tally: Tally, *, min_blocks: int) -> dict[str, dict[str, float | None]]:
    """{position: {survival, conditional}} of a replay, macro; positions count from 1."""
    survival = tally.macro_survival(min_blocks=min_blocks)
    pairs = zip(*_positions(survival, tally.survival.shape[-1]), strict=True)
    return {
        str(k): {"survival": survived, "conditional": rate}
        for k, (survived, rate) in enumerate(pairs, start=1)
    }


def position_rows(row: Row, *, num_slots: int) -> list[Row]:
    """by_position.csv: one validation's columns, a row a position."""
    return [
        {
            "position": k,
            **{
                f"{name}_{kind}": row[f"{name}_{kind}/{k}"]
                for name in NAMES
                for kind in ("survival", "conditional")
            },
        }
        for k in range(1, num_slots + 1)
    ]


def _positions(
    survival: Tensor | None, num_slots: int
) -> tuple[list[float | None], list[float | None]]:
    """Survival, and the share of those that reached the position before."""
    if survival is None:
        return [None] * num_slots, [None] * num_slots
    values = survival.tolist()
    before = [1.0, *values[:-1]]
    return values, [now / was if was else None for now, was in zip(values, before, strict=True)]
