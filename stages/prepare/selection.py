"""Chooses the evaluation sets, then the training prompts that share nothing with them.

Evaluation comes first and looks at no training setting, not even the seed: its sets change only
when their sources, their number or what the target's template can take do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stages.params import DOMAINS
from stages.prepare.overlap import OverlapIndex, near_duplicate_key
from stages.prepare.prompt import Candidates, Prompt, Reject, below, reject, round_robin

Fault = tuple[str, str]  # reason, detail
Check = Callable[[Prompt], Fault | None]


@dataclass(kw_only=True)
class Selection:
    """What was chosen, and what was looked at and left out."""

    evaluation: dict[str, list[Prompt]] = field(default_factory=dict)
    train: list[Prompt] = field(default_factory=list)
    validation: list[Prompt] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    shared_phrases: Counter[str] = field(default_factory=Counter)


def choose_evaluation(
    sources: Sequence[Candidates], *, number: int, check: Check, rejects: list[Reject]
) -> dict[str, list[Prompt]]:
    """The first `number` prompts of each domain that pass `check`, its sources in turn.

    Raises ValueError naming the domains that fall short.
    """
    chosen: dict[str, list[Prompt]] = {}
    for domain in DOMAINS:
        streams = [source.evaluation for source in sources if source.domain == domain]
        chosen[domain] = list(_take(round_robin(streams), number, check, rejects))
    short = {domain: len(found) for domain, found in chosen.items() if len(found) < number}
    if short:
        raise ValueError(
            f"prepare: evaluation needs {number} prompts in each of the nine domains "
            f"(prepare.num_evaluation_prompts); found too few in {short}. Add a source for the "
            "domain to prepare.sources, for example {kind: file, path: mine.jsonl, domain: "
            f"{next(iter(short))}, use: evaluation}}"
            + (f"; left out: {dict(_reasons(rejects))}" if rejects else "")
        )
    return chosen


def _take(
    stream: Iterable[Prompt], number: int, check: Check, rejects: list[Reject]
) -> Iterator[Prompt]:
    seen: set[str] = set()
    for prompt in stream:
        if len(seen) == number:
            return
        if prompt.id in seen:
            continue
        fault = check(prompt)
        if fault is not None:
            rejects.append(reject(prompt.source, *fault))
            continue
        seen.add(prompt.id)
        yield prompt


def choose_train(
    sources: Sequence[Candidates],
    *,
    number: int,
    index: OverlapIndex,
    check: Check,
    validation_fraction: float,
    selection: Selection,
) -> None:
    """Fills `selection` with up to `number` prompts, one of each domain in turn.

    A domain that runs out leaves its share to the others. What falls into validation is decided by
    a hash of the prompt's id.
    """
    streams = [
        round_robin([source.train for source in sources if source.domain == domain])
        for domain in DOMAINS
    ]
    seen: set[str] = set()
    accepted = (_accept(stream, index, check, selection, seen) for stream in streams)
    for count, prompt in enumerate(round_robin(accepted), start=1):
        apart = below(f"validation/{prompt.id}", validation_fraction)
        (selection.validation if apart else selection.train).append(prompt)
        if count == number:
            break


def _accept(
    stream: Iterable[Prompt],
    index: OverlapIndex,
    check: Check,
    selection: Selection,
    seen: set[str],
) -> Iterator[Prompt]:
    for prompt in stream:
        key = near_duplicate_key(prompt)
        if key in seen:
            fault: Fault | None = ("duplicate", "")
        elif (shared := index.shared(prompt)) is not None:
            selection.shared_phrases[shared] += 1
            fault = ("overlaps_evaluation", f"{shared!r}, with {index.grams[shared]}")
        else:
            fault = check(prompt)
        if fault is not None:
            selection.rejects.append(reject(prompt.source, *fault))
            continue
        seen.add(key)
        yield prompt


def _reasons(rejects: Iterable[Reject]) -> Counter[str]:
    return Counter(item["reason"] for item in rejects)
