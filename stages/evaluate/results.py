"""From measured rows to the published tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.evaluate import formulas
from stages.evaluate.formulas import Pair, Rounds, Speed
from stages.params import DOMAINS

MACRO = "macro"


@dataclass(frozen=True)
class Domain:
    """One domain's numbers."""

    prompts: int
    rounds: Rounds  # trimmed
    raw_accepted: int  # as vLLM counts
    length: float | None
    length_without_looping: float | None
    tokens_per_round: float | None
    looping: int  # responses that repeat themselves
    out_of_vocabulary: float | None  # share of the response tokens that cannot be drafted
    survivals: list[float]
    reached: list[float]  # share of the drafts that got to each position
    speed: Speed
    first_token_s: dict[str, float | None]  # median, by engine, at concurrency 1


@dataclass(frozen=True)
class Results:
    domains: dict[str, Domain]
    macro_length: float | None
    macro_length_without_looping: float | None
    macro_tokens_per_round: float | None
    macro_survivals: list[float]
    macro_reached: list[float]
    macro_speedup: float | None


def aggregate(
    acceptance: Sequence[Mapping[str, Any]],
    speed: Sequence[Mapping[str, Any]],
    *,
    block_size: int,
    min_speed_tokens: int,
) -> Results:
    """acceptance: the journal's rows, judged (responses.py); speed: the journal's (measure.py).

    Raises ValueError for counts that cannot be (more accepted than a block holds)."""
    domains = {
        name: _domain(
            [row for row in acceptance if row["domain"] == name],
            [row for row in speed if row["domain"] == name],
            block_size=block_size,
            min_speed_tokens=min_speed_tokens,
        )
        for name in DOMAINS
    }
    drafted = [domain for domain in domains.values() if domain.length is not None]
    return Results(
        domains=domains,
        macro_length=formulas.mean(domain.length for domain in drafted),
        macro_length_without_looping=formulas.mean(
            domain.length_without_looping for domain in drafted
        ),
        macro_tokens_per_round=formulas.mean(
            domain.tokens_per_round for domain in domains.values()
        ),
        macro_survivals=[
            formulas.mean(domain.survivals[position] for domain in drafted) or 0.0
            for position in range(block_size)
        ],
        macro_reached=[
            formulas.mean(domain.reached[position] for domain in drafted) or 0.0
            for position in range(block_size)
        ],
        macro_speedup=formulas.geometric_mean(domain.speed.ratio for domain in domains.values()),
    )


def metrics(results: Results, *, lossless: Mapping[str, int]) -> dict[str, Any]:
    """metrics.json: keys that are never renamed or dropped."""
    return {
        "macro_acceptance_length": results.macro_length,
        "macro_acceptance_length_without_looping": results.macro_length_without_looping,
        "macro_speedup": results.macro_speedup,
        "macro_tokens_per_round": results.macro_tokens_per_round,
        "domains": {
            name: {
                "acceptance_length": domain.length,
                "acceptance_length_without_looping": domain.length_without_looping,
                "looping": domain.looping,
                "out_of_vocabulary": domain.out_of_vocabulary,
                "tokens_per_s_per_user": domain.speed.drafter,
                "baseline_tokens_per_s_per_user": domain.speed.baseline,
                "speedup": domain.speed.ratio,
                "prompts": domain.prompts,
                "drafts": domain.rounds.drafts,
                "tokens_per_round": domain.tokens_per_round,
                "first_token_s": domain.first_token_s["drafter"],
                "baseline_first_token_s": domain.first_token_s["baseline"],
            }
            for name, domain in results.domains.items()
        },
        "lossless": {"checked": lossless["checked"], "identical": lossless["identical"]},
    }


def position_rows(results: Results) -> list[dict[str, Any]]:
    """by_position.csv; positions count from 1, `conditional` is empty where nothing got there."""
    sets = [
        (name, domain.survivals, domain.reached, domain.rounds.drafts)
        for name, domain in results.domains.items()
    ]
    total = sum(domain.rounds.drafts for domain in results.domains.values())
    sets.append((MACRO, results.macro_survivals, results.macro_reached, total))
    return [
        {
            "domain": name,
            "position": position,
            "survival": survival,
            "conditional": "" if conditional is None else conditional,
            "drafts": drafts,
        }
        for name, survivals, reach, drafts in sets
        for position, (survival, conditional) in enumerate(
            zip(survivals, formulas.conditional(survivals, reach), strict=True), start=1
        )
    ]


def domain_rows(results: Results) -> list[dict[str, Any]]:
    """per_domain.csv; what was not measured is empty."""
    rows = [
        {
            "domain": name,
            "acceptance_length": domain.length,
            "acceptance_length_without_looping": domain.length_without_looping,
            "prompts": domain.prompts,
            "looping": domain.looping,
            "drafts": domain.rounds.drafts,
            "undrafted_rounds": domain.rounds.undrafted,
            "tokens_per_round": domain.tokens_per_round,
            "accepted": sum(domain.rounds.accepted),
            "out_of_vocabulary": domain.out_of_vocabulary,
            "tokens_per_s_per_user": domain.speed.drafter,
            "baseline_tokens_per_s_per_user": domain.speed.baseline,
            "speedup": domain.speed.ratio,
            "speed_pairs": domain.speed.pairs,
        }
        for name, domain in results.domains.items()
    ]
    return [{key: "" if value is None else value for key, value in row.items()} for row in rows]


def notes(results: Results, *, min_speed_tokens: int) -> list[str]:
    """What is missing from the averages, in words."""
    found = []
    for name, domain in results.domains.items():
        if domain.length is None:
            found.append(f"{name}: no draft was made; left out of macro_acceptance_length")
        elif domain.length_without_looping is None:
            found.append(
                f"{name}: every response loops; left out of macro_acceptance_length_without_looping"
            )
        if domain.speed.ratio is None:
            found.append(
                f"{name}: no prompt has {min_speed_tokens} output tokens on both engines; left out "
                "of macro_speedup"
            )
    return found


def _domain(
    acceptance: Sequence[Mapping[str, Any]],
    speed: Sequence[Mapping[str, Any]],
    *,
    block_size: int,
    min_speed_tokens: int,
) -> Domain:
    raw = formulas.together(
        Rounds(tuple(row["drafted"]), tuple(row["accepted"])) for row in acceptance
    )
    rounds = response_rounds(acceptance)
    length = formulas.acceptance_length(rounds)
    survivals = formulas.survival(rounds, num_positions=block_size)
    if length is not None:
        formulas.check_identity(length, survivals)
    num_tokens = sum(row["num_tokens"] for row in acceptance)
    return Domain(
        prompts=len(acceptance),
        rounds=rounds,
        raw_accepted=sum(raw.accepted),
        length=length,
        length_without_looping=formulas.acceptance_length(
            response_rounds(row for row in acceptance if not row["looping"])
        ),
        tokens_per_round=formulas.tokens_per_round(rounds),
        looping=sum(row["looping"] for row in acceptance),
        out_of_vocabulary=sum(row["out_of_vocabulary"] for row in acceptance) / num_tokens
        if num_tokens
        else None,
        survivals=survivals,
        reached=formulas.reached(rounds, num_positions=block_size),
        speed=formulas.domain_speed(map(pair, speed), min_tokens=min_speed_tokens),
        first_token_s={
            engine: formulas.median(row[engine]["first_s"] for row in speed)
            for engine in ("drafter", "baseline")
        },
    )


def response_rounds(rows: Iterable[Mapping[str, Any]]) -> Rounds:
    """The rounds of responses: rows with drafted, accepted, num_tokens and finish_reason."""
    return formulas.together(
        formulas.trimmed(
            Rounds(tuple(row["drafted"]), tuple(row["accepted"])),
            num_tokens=row["num_tokens"],
            finish_reason=row["finish_reason"],
        )
        for row in rows
    )


def pair(row: Mapping[str, Any]) -> Pair:
    """A row of the speed journal (measure.py)."""

    def speed(timing: Mapping[str, Any]) -> float | None:
        if timing["first_s"] is None:
            return None
        return formulas.speed(
            num_tokens=timing["num_tokens"], first_s=timing["first_s"], last_s=timing["last_s"]
        )

    return Pair(
        drafter_tokens=row["drafter"]["num_tokens"],
        baseline_tokens=row["baseline"]["num_tokens"],
        drafter_speed=speed(row["drafter"]),
        baseline_speed=speed(row["baseline"]),
    )
