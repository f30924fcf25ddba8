"""The full depth: what is measured beyond `core`, and how it is published.

Load (load.py, pareto.py), context (context.py) and sampling. Adds about ten minutes to core on two
cores at the default settings. Pure, but for plan_context, which reads texts and asks given servers
for their limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.evaluate import context, formulas, pareto, results
from stages.evaluate.prompts import Prompt, first_of_each, room
from stages.params import DOMAINS, EngineParams, EvaluateParams, Services
from stages.services import MANAGED
from stages.serving.launch import given_endpoint

FULL = "full"
ENGINE_PREFIX = {"drafter": "", "baseline": "baseline_"}


@dataclass(frozen=True)
class LongContext:
    """The prompts of the context part, and how long a sequence its servers must take."""

    prompts: list[Prompt]
    max_model_len: int
    source: str
    notes: list[str]


@dataclass(frozen=True)
class Asked:
    """What to measure on one pair of servers: prompts by the journal of their part, and load."""

    prompts: dict[str, list[Prompt]]
    concurrencies: list[int]


def parts(
    prompts: list[Prompt],
    *,
    long: LongContext | None,
    engine: EngineParams,
    evaluate: EvaluateParams,
) -> list[tuple[int, Asked]]:
    """(max_model_len, what to measure) of each pair of servers; `long` is None at core depth.

    Contexts that engine.max_model_len does not hold get servers of their own: longer sequences
    might change how fast the others are.
    """
    speed = first_of_each(prompts, limit=evaluate.speed_prompts)
    first = {"acceptance": prompts, "speed": speed, "sampled": [], "context": []}
    if long is None:
        return [(engine.max_model_len, Asked(first, []))]
    first["sampled"] = first_of_each(prompts, limit=evaluate.sampled_prompts)
    second = {"acceptance": [], "speed": [], "sampled": [], "context": long.prompts}
    if long.max_model_len <= engine.max_model_len:
        whole = first | {"context": long.prompts}
        return [(engine.max_model_len, Asked(whole, evaluate.load_concurrencies))]
    return [
        (engine.max_model_len, Asked(first, evaluate.load_concurrencies)),
        (long.max_model_len, Asked(second, [])),
    ]


def plan_context(
    inputs: Mapping[str, Path],
    *,
    engine: EngineParams,
    evaluate: EvaluateParams,
    services: Services,
    block_size: int,
    render: context.Render,
) -> LongContext:
    """Raises ValueError for a LongBench-v2 file that is none, or servers without room."""
    urls = (services.evaluate.drafter, services.evaluate.baseline)
    limit = min(
        target_limit(inputs["target"], engine=engine)
        if url == MANAGED
        else given_endpoint(url).max_model_len or engine.max_model_len
        for url in urls
    )
    longest = room(max_model_len=limit, max_tokens=evaluate.max_tokens, block_size=block_size)
    bounds = context.buckets(evaluate.context_lengths, longest=longest)
    number = evaluate.context_prompts

    if evaluate.longbench is None:
        documents = context.read_documents(inputs["prompts"])

        def texts(bound: int) -> list[context.Text]:
            return context.authored(documents, bound=bound, number=number)
    else:
        items = context.read_longbench(Path(evaluate.longbench))

        def texts(bound: int) -> list[context.Text]:
            return context.longbench(items, bound=bound, number=number)

    prompts, notes = context.make_prompts(texts, bounds=bounds, render=render)
    return LongContext(
        prompts=prompts,
        # No more than is asked for: a server keeps room in its cache for one sequence that long.
        max_model_len=limit - longest + bounds[-1],
        source=context.AUTHORED if evaluate.longbench is None else context.LONGBENCH,
        notes=notes,
    )


def target_limit(target: Path, *, engine: EngineParams) -> int:
    """Tokens of the longest sequence that the target's config.json, or else params, allows."""
    config = json.loads((target / "config.json").read_text())
    text = config.get("text_config", config)
    return max(engine.max_model_len, int(text.get("max_position_embeddings") or 0))


def body(
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    long: LongContext,
    evaluate: EvaluateParams,
) -> dict[str, Any]:
    """serving.json's `full`, from the journals' rows by name."""
    load = sorted(rows["load"], key=lambda row: int(row["concurrency"]))
    sides = {engine: {row["concurrency"]: row[engine] for row in load} for engine in ENGINE_PREFIX}
    return {
        "load": {
            str(row["concurrency"]): {engine: row[engine] for engine in ENGINE_PREFIX}
            for row in load
        },
        "pareto": pareto.compare(sides["drafter"], sides["baseline"]),
        "context": context.rows_by_length(
            rows["context"], prompts=long.prompts, min_speed_tokens=evaluate.min_speed_tokens
        ),
        "context_source": long.source,
        "sampled": sampling(rows["sampled"], temperature=evaluate.sampled_temperature),
        "context_responses": list(rows["context"]),
        "failures": {str(row["concurrency"]): row["failures"] for row in load},
    }


def sampling(rows: Sequence[Mapping[str, Any]], *, temperature: float) -> dict[str, Any]:
    domains = {}
    for name in DOMAINS:
        own = [row for row in rows if row["domain"] == name]
        rounds = results.response_rounds(own)
        domains[name] = {
            "acceptance_length": formulas.acceptance_length(rounds),
            "tokens_per_round": formulas.tokens_per_round(rounds),
            "prompts": len(own),
        }
    return {
        "temperature": temperature,
        "macro_acceptance_length": formulas.mean(
            domain["acceptance_length"] for domain in domains.values()
        ),
        "macro_tokens_per_round": formulas.mean(
            domain["tokens_per_round"] for domain in domains.values()
        ),
        "domains": domains,
    }


def metrics(full: Mapping[str, Any]) -> dict[str, float | int | None]:
    """metrics.json's `full`: flat, with the same keys for the same params and target."""
    flat: dict[str, float | int | None] = {
        "matched_interactivity_ratio": full["pareto"]["best_ratio"],
        "matched_interactivity": full["pareto"]["at_interactivity"],
        "sampled_macro_acceptance_length": full["sampled"]["macro_acceptance_length"],
        "sampled_macro_tokens_per_round": full["sampled"]["macro_tokens_per_round"],
    }
    for concurrency, sides in full["load"].items():
        for engine, prefix in ENGINE_PREFIX.items():
            side = sides[engine]
            flat |= {
                f"{prefix}throughput_c{concurrency}": side["tokens_per_s"],
                f"{prefix}tokens_per_s_per_user_c{concurrency}": side["tokens_per_s_per_user"],
                f"{prefix}first_token_s_c{concurrency}": side["first_token_s"]["median"],
                f"{prefix}first_token_p95_s_c{concurrency}": side["first_token_s"]["p95"],
                f"{prefix}inter_token_s_c{concurrency}": side["inter_token_s"]["median"],
                f"{prefix}inter_token_p95_s_c{concurrency}": side["inter_token_s"]["p95"],
                f"{prefix}failed_c{concurrency}": side["failed"],
            }
        flat[f"acceptance_length_c{concurrency}"] = sides["drafter"]["acceptance_length"]
        flat[f"tokens_per_round_c{concurrency}"] = sides["drafter"]["tokens_per_round"]
    for row in full["context"]:
        length = row["prompt_tokens"]
        flat[f"acceptance_length_context_{length}"] = row["acceptance_length"]
        flat[f"speedup_context_{length}"] = row["speedup"]
    return flat


def load_rows(full: Mapping[str, Any]) -> list[dict[str, Any]]:
    """load.csv: a row an engine and concurrency."""
    rows = []
    for concurrency, sides in full["load"].items():
        for engine in ENGINE_PREFIX:
            row: dict[str, Any] = {"concurrency": int(concurrency), "engine": engine}
            for key, value in sides[engine].items():
                if isinstance(value, dict):
                    stem = key.removesuffix("_s")
                    row |= {f"{stem}_{name}_s": number for name, number in value.items()}
                else:
                    row[key] = value
            rows.append(row)
    return rows
