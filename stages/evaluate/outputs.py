"""The evaluation artifact's tables and plots, and the parts of serving.json that list things."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages import contracts
from stages.evaluate import formulas, full, plots, results
from stages.params import Services
from stages.serving.plans import on_cpu


def details(found: results.Results) -> dict[str, Any]:
    """serving.json's `domains`."""
    return {
        name: {
            "accepted": sum(domain.rounds.accepted),
            "accepted_as_vllm_counts": domain.raw_accepted,
            "undrafted_rounds": domain.rounds.undrafted,
            "survival": domain.survivals,
            "conditional": formulas.conditional(domain.survivals, domain.reached),
            "speedup": domain.speed.ratio,
            "speed_pairs": domain.speed.pairs,
            "first_token_s": domain.first_token_s,
        }
        for name, domain in found.domains.items()
    }


def write(
    folder: Path, found: results.Results, *, block_size: int, deep: Mapping[str, Any] | None
) -> None:
    """Tables and plots; with `deep`, serving.json's `full`, load.csv and context.csv too."""
    tables = {
        "by_position.csv": results.position_rows(found),
        "per_domain.csv": results.domain_rows(found),
    }
    if deep is not None:
        tables |= {"load.csv": full.load_rows(deep), "context.csv": deep["context"]}
    for name, rows in tables.items():
        _write_csv(folder / name, rows)
    plots.acceptance_by_domain(
        {name: domain.length for name, domain in found.domains.items()},
        {name: domain.length_without_looping for name, domain in found.domains.items()},
        macro=found.macro_length,
        block_size=block_size,
        path=folder / "plots" / "acceptance_by_domain.png",
    )
    plots.acceptance_by_position(
        {name: domain.survivals for name, domain in found.domains.items()},
        macro=found.macro_survivals,
        path=folder / "plots" / "acceptance_by_position.png",
    )


def environment(services: Services) -> dict[str, Any]:
    """serving.json's `environment`."""
    return {
        "device": "cpu" if on_cpu() else "cuda",
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": contracts.installed_versions(),
        "services": services.model_dump(mode="json", include={"vllm", "evaluate"}),
    }


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """What was not measured is empty."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
