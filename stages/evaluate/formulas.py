"""Every number of the evaluation as a pure function of what was measured.

Acceptance length = 1 + accepted draft tokens / drafts; a draft is one round of at least one draft
token, and the 1 is the bonus token. Survival of position k = share of drafts whose first k tokens
were all accepted (unconditional), so acceptance length = 1 + sum of survival, whatever the lengths.
Conditional acceptance of position k = share accepted of the rounds that drafted a k-th token and
accepted all before it. Tokens a round = the same as acceptance length over ALL decode rounds, those
that drafted nothing included: they bring one token each.
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
    """The decode rounds of one response or of many: accepted[i] of drafted[i] >= 1 tokens in
    round i, and how many rounds drafted nothing."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    undrafted: int = 0

    @property
    def drafts(self) -> int:
        return len(self.drafted)


def trimmed(rounds: Rounds, *, num_tokens: int, finish_reason: str) -> Rounds:
    """A response's rounds without tokens behind its end, and with those that drafted nothing.

    vLLM counts a whole block before it looks for the end (vllm-project/vllm#56101), and lists no
    round without a draft. A response of `num_tokens` tokens holds one of the prefill, accepted + 1
    of each drafted round and one of each other round. What is above that sum are other rounds; what
    is below it is cut off the last round, unless the response was cut at max_tokens: there the
    target would have said those tokens. The two can hide each other in the last round, so a
    response with both may have up to that round's accepted tokens more of each.
    """
    missing = num_tokens - (1 + sum(rounds.accepted) + rounds.drafts)
    accepted = rounds.accepted
    if missing < 0 and finish_reason == END_OF_SEQUENCE and accepted:
        accepted = (*accepted[:-1], max(0, accepted[-1] + missing))
    return Rounds(rounds.drafted, accepted, undrafted=max(0, missing))


def together(rounds: Iterable[Rounds]) -> Rounds:
    parts = list(rounds)
    return Rounds(
        tuple(value for part in parts for value in part.drafted),
        tuple(value for part in parts for value in part.accepted),
        undrafted=sum(part.undrafted for part in parts),
    )


def acceptance_length(rounds: Rounds) -> float | None:
    """Tokens a drafted round, bonus included; None without a draft."""
    return 1 + sum(rounds.accepted) / rounds.drafts if rounds.drafts else None


def tokens_per_round(rounds: Rounds) -> float | None:
    """Tokens a decode round, those without a draft included; None without a round."""
    total = rounds.drafts + rounds.undrafted
    return 1 + sum(rounds.accepted) / total if total else None


def survival(rounds: Rounds, *, num_positions: int) -> list[float]:
    """Share of all drafts whose first k tokens were accepted, for k = 1..num_positions."""
    if not rounds.drafts:
        return [0.0] * num_positions
    return [
        sum(accepted >= position for accepted in rounds.accepted) / rounds.drafts
        for position in range(1, num_positions + 1)
    ]


def reached(rounds: Rounds, *, num_positions: int) -> list[float]:
    """Share of all drafts that drafted a k-th token and accepted all before it, for k = 1.."""
    if not rounds.drafts:
        return [0.0] * num_positions
    pairs = list(zip(rounds.drafted, rounds.accepted, strict=True))
    return [
        sum(drafted >= position and accepted >= position - 1 for drafted, accepted in pairs)
        / rounds.drafts
        for position in range(1, num_positions + 1)
    ]


def conditional(survivals: Sequence[float], reach: Sequence[float]) -> list[float | None]:
    """Share accepted at each position of those that got there (reached()); None where none did."""
    return [now / before if before else None for now, before in zip(survivals, reach, strict=True)]


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


def counted_speeds(pairs: Iterable[Pair], *, min_tokens: int) -> list[tuple[float, float]]:
    """(with drafter, without) of the pairs whose responses both have at least `min_tokens`."""
    return [
        (pair.drafter_speed, pair.baseline_speed)
        for pair in pairs
        if min(pair.drafter_tokens, pair.baseline_tokens) >= min_tokens
        and pair.drafter_speed is not None
        and pair.baseline_speed is not None
    ]


def domain_speed(pairs: Iterable[Pair], *, min_tokens: int) -> Speed:
    """Of the pairs that count."""
    counted = counted_speeds(pairs, min_tokens=min_tokens)
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


Counters = dict[str, dict[str, float]]
"""{name without `_total`: {labels as exported, such as '{engine="0"}': value}}."""


def counter_difference(
    before: Counters, after: Counters, *, names: Sequence[str]
) -> dict[str, float]:
    """How much each counter grew, summed over its series (a server may run several engines).

    Raises ValueError when one is missing, and when a single series fell or vanished: the growth of
    the others would hide it in a sum.
    """
    grown: dict[str, float] = {}
    for name in names:
        if name not in after:
            raise ValueError(f"the drafter server exports no counter {name}: it does not speculate")
        for labels, value in before.get(name, {}).items():
            now = after[name].get(labels)
            if now is None or now < value:
                raise ValueError(
                    f"counter {name}{labels} fell from {value} to {now}: the drafter server was "
                    "restarted while it was measured; run the stage again"
                )
        grown[name] = sum(after[name].values()) - sum(before.get(name, {}).values())
    return grown


def parse_counters(page: str) -> Counters:
    """Every counter in a Prometheus text page, by series."""
    counters: Counters = {}
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name, brace, labels = series.partition("{")
        if name.endswith("_total"):
            counters.setdefault(name.removesuffix("_total"), {})[brace + labels] = float(value)
    return counters
