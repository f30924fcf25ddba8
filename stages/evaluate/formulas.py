"""Every number of the evaluation as a pure function of what was measured.

Acceptance length = 1 + accepted draft tokens / drafts; a draft is one round of at least one draft
token, and the 1 is the bonus token. Survival of position k = share of drafts whose first k tokens
were all accepted (unconditional), so acceptance length = 1 + sum of survival.
Speed of one user = (output tokens - 1) / (time of the last - time of the first), in tokens/s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

END_OF_SEQUENCE = "stop"  # vLLM's finish reason


@dataclass(frozen=True)
class Rounds:
    """The drafts of one response or of many: accepted[i] of drafted[i] tokens in round i."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def drafts(self) -> int:
        return len(self.drafted)


def trimmed(rounds: Rounds, *, num_tokens: int, finish_reason: str) -> Rounds:
    """Without tokens that the engine accepted behind the end-of-sequence token.

    vLLM counts a whole block before it looks for the end (vllm-project/vllm#56101). A response of
    `num_tokens` tokens holds one of the prefill and accepted + 1 of each round, so the surplus is
    known, and it is in the last round. A response cut at max_tokens keeps its last round: there
    the target would have said those tokens.
    """
    if finish_reason != END_OF_SEQUENCE or not rounds.accepted:
        return rounds
    surplus = 1 + sum(rounds.accepted) + rounds.drafts - num_tokens
    last = rounds.accepted[-1] - max(0, surplus)
    return Rounds(rounds.drafted, (*rounds.accepted[:-1], max(0, last)))


def together(rounds: Iterable[Rounds]) -> Rounds:
    parts = list(rounds)
    return Rounds(
        tuple(value for part in parts for value in part.drafted),
        tuple(value for part in parts for value in part.accepted),
    )


def acceptance_length(rounds: Rounds) -> float | None:
    """Tokens a round, bonus included; None without a draft."""
    return 1 + sum(rounds.accepted) / rounds.drafts if rounds.drafts else None


def survival(rounds: Rounds, *, num_positions: int) -> list[float]:
    """Share of all drafts whose first k tokens were accepted, for k = 1..num_positions."""
    if not rounds.drafts:
        return [0.0] * num_positions
    return [
        sum(accepted >= position for accepted in rounds.accepted) / rounds.drafts
        for position in range(1, num_positions + 1)
    ]


def conditional(survivals: Sequence[float]) -> list[float | None]:
    """Share accepted at each position of those that got there; None where none did."""
    before = [1.0, *survivals[:-1]]
    return [
        now / reached if reached else None for now, reached in zip(survivals, before, strict=True)
    ]


def check_identity(length: float, survivals: Sequence[float]) -> None:
    """Acceptance length = 1 + sum of survival. It fails only by a bug of ours or of the counts."""
    total = 1 + math.fsum(survivals)
    if not math.isclose(length, total, rel_tol=1e-9, abs_tol=1e-9):
        raise ValueError(
            f"acceptance length {length} is not 1 + the sum of survival ({total}): the engine "
            "accepted more tokens a round than the drafter's block holds"
        )


def speed(*, num_tokens: int, first_s: float, last_s: float) -> float | None:
    """Tokens per second of one user; None where there is nothing to time."""
    if num_tokens < 2 or last_s <= first_s:
        return None
    return (num_tokens - 1) / (last_s - first_s)


@dataclass(frozen=True)
class Pair:
    """One prompt on both engines, back to back."""

    drafter_tokens: int
    baseline_tokens: int
    drafter_speed: float | None
    baseline_speed: float | None


@dataclass(frozen=True)
class Speed:
    """Medians over the pairs of a domain that count; `ratio` is the median of their ratios."""

    pairs: int
    drafter: float | None
    baseline: float | None
    ratio: float | None


def domain_speed(pairs: Iterable[Pair], *, min_tokens: int) -> Speed:
    """A pair counts when both responses have at least `min_tokens` tokens."""
    counted = [
        (pair.drafter_speed, pair.baseline_speed)
        for pair in pairs
        if min(pair.drafter_tokens, pair.baseline_tokens) >= min_tokens
        and pair.drafter_speed is not None
        and pair.baseline_speed is not None
    ]
    if not counted:
        return Speed(0, None, None, None)
    return Speed(
        pairs=len(counted),
        drafter=statistics.median(with_drafter for with_drafter, _ in counted),
        baseline=statistics.median(plain for _, plain in counted),
        ratio=statistics.median(with_drafter / plain for with_drafter, plain in counted),
    )


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def counter_difference(
    before: dict[str, float], after: dict[str, float], *, names: Sequence[str]
) -> dict[str, float]:
    """How much each counter grew. Raises ValueError when one is missing or ran backwards."""
    grown: dict[str, float] = {}
    for name in names:
        if name not in after:
            raise ValueError(f"the drafter server exports no counter {name}: it does not speculate")
        grown[name] = after[name] - before.get(name, 0.0)
        if grown[name] < 0:
            raise ValueError(
                f"counter {name} fell from {before.get(name)} to {after[name]}: the drafter "
                "server was restarted while it was measured; run the stage again"
            )
    return grown


def parse_counters(page: str) -> dict[str, float]:
    """Sums over labels of every counter in a Prometheus text page, by name without `_total`."""
    totals: dict[str, float] = {}
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        if name.endswith("_total"):
            name = name.removesuffix("_total")
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals
