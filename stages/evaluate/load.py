"""Speed under load: both engines with 1, 2, 4, ... requests in flight, on the same prompts.

At each concurrency the engines run in turn, and which goes first alternates; both servers are up,
and an idle one takes no core. A slot that is free takes the next prompt (a closed loop). Cost at
the default settings on two cores: about six minutes, half of it at concurrency 1.

Throughput is that of the span in which every slot was busy: from the first request to the first end
that no further request follows. The tail, in which fewer and fewer requests run, would otherwise
lower it, and more so where responses differ in length.

The latency between tokens is counted for each token after the first chunk: the gap before its chunk
over the tokens in that chunk. A drafter's round brings several tokens in one chunk. The mean is
(last - first) / (tokens - 1), vLLM's TPOT, on both engines; vLLM's ITL is that of a chunk, and
would charge the drafter for bringing more at once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from stages.evaluate import formulas
from stages.evaluate.formulas import Rounds
from stages.evaluate.measure import MAX_FAILURES, WARM_UP_TOKENS, Setting
from stages.evaluate.prompts import Prompt, spread
from stages.journal import Journal
from stages.serving.client import Client, Completion, EndpointError, run_bounded
from stages.serving.launch import Endpoint

ENGINES = ("baseline", "drafter")
REQUESTS_PER_SLOT = 4  # at least: one round of prompts that all start together is no steady load


@dataclass(frozen=True)
class Answer:
    """A streamed response. All times are seconds on one clock."""

    sent_s: float
    ended_s: float
    token_times_s: tuple[float, ...]  # tokens of one chunk share their time
    rounds: Rounds | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_times_s)


def workload(prompts: Sequence[Prompt], *, requests: int, concurrency: int) -> list[Prompt]:
    """What both engines are asked: the domains in turn, from the start again where it takes more
    than there are."""
    number = max(requests, REQUESTS_PER_SLOT * concurrency)
    turns = spread(list(prompts), count=len(prompts))
    return list(itertools.islice(itertools.cycle(turns), number))


async def measure_load(
    prompts: Sequence[Prompt],
    *,
    drafter: Endpoint,
    baseline: Endpoint,
    setting: Setting,
    min_speed_tokens: int,
    concurrencies: Sequence[int],
    requests: int,
    journal: Journal,
) -> None:
    """Appends a row a concurrency: `concurrency`, `order`, a side an engine, `failures` by engine.

    A request that fails is counted and not sent again. Raises ValueError when more than
    MAX_FAILURES in a row fail, or one did and the server does not answer afterwards.
    """
    done = {row["concurrency"] for row in journal.rows}
    async with setting.client(drafter) as with_drafter, setting.client(baseline) as plain:
        clients = {"drafter": with_drafter, "baseline": plain}
        for client in clients.values():
            await client.complete(setting.warm_up, max_tokens=WARM_UP_TOKENS, temperature=0.0)
        for index, concurrency in enumerate(concurrencies):
            if concurrency in done:
                continue
            asked = workload(prompts, requests=requests, concurrency=concurrency)
            order = ENGINES if index % 2 == 0 else ENGINES[::-1]
            row: dict[str, Any] = {"concurrency": concurrency, "order": list(order)}
            failures: dict[str, list[str]] = {}
            for engine in order:
                answers, failures[engine] = await run_load(
                    clients[engine],
                    asked,
                    engine=engine,
                    concurrency=concurrency,
                    max_tokens=setting.max_tokens,
                )
                row[engine] = side(
                    answers,
                    failed=len(failures[engine]),
                    concurrency=concurrency,
                    min_speed_tokens=min_speed_tokens,
                )
            journal.append({**row, "failures": failures})


async def run_load(
    client: Client, prompts: Sequence[Prompt], *, engine: str, concurrency: int, max_tokens: int
) -> tuple[list[Answer], list[str]]:
    """The answers, and a reason for every request that failed."""
    answers: list[Answer] = []
    failures: list[str] = []
    in_a_row = 0

    async def one(prompt: Prompt) -> Answer | str:
        try:
            completion = await client.complete(
                prompt.token_ids, max_tokens=max_tokens, temperature=0.0, stream=True
            )
        except EndpointError as error:
            return f"{prompt.id}: {error}"
        return _answer(completion, ended_s=time.perf_counter())

    with tqdm(total=len(prompts), desc=f"load {concurrency} {engine}", unit="request") as progress:
        async for _, found in run_bounded(prompts, one, concurrency=concurrency):
            progress.update()
            if isinstance(found, Answer):
                answers.append(found)
                in_a_row = 0
                continue
            failures.append(found)
            in_a_row += 1
            if in_a_row > MAX_FAILURES:
                raise _dead(failures, engine=engine, concurrency=concurrency)
    if failures and not await client.healthy():
        raise _dead(failures, engine=engine, concurrency=concurrency)
    return answers, failures


def _answer(completion: Completion, *, ended_s: float) -> Answer:
    sent_s, rounds = ended_s - completion.elapsed_s, None
    if completion.speculative is not None:
        rounds = formulas.trimmed(
            Rounds(completion.speculative.drafted, completion.speculative.accepted),
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )
    return Answer(
        sent_s=sent_s,
        ended_s=ended_s,
        token_times_s=tuple(sent_s + at for at in completion.token_times_s),
        rounds=rounds,
    )


def _dead(failures: Sequence[str], *, engine: str, concurrency: int) -> ValueError:
    reasons = "\n".join(f"  {reason}" for reason in failures[-MAX_FAILURES:])
    return ValueError(
        f"evaluate: the {engine} server fails under {concurrency} requests at once:\n{reasons}\n"
        "the concurrencies before are kept; run the stage again once the server is well"
    )


def side(
    answers: Sequence[Answer], *, failed: int, concurrency: int, min_speed_tokens: int
) -> dict[str, Any]:
    """One engine's numbers at one concurrency.

    tokens_per_s is that of `busy_s`, the span in which every slot was busy; output_tokens and
    elapsed_s are of the whole, so their quotient is lower.
    """
    first = [answer.token_times_s[0] - answer.sent_s for answer in answers if answer.num_tokens]
    rounds = formulas.together(answer.rounds for answer in answers if answer.rounds is not None)
    start_s = min((answer.sent_s for answer in answers), default=0.0)
    end_s = max((answer.ended_s for answer in answers), default=0.0)
    busy_end_s = busy_until(answers, concurrency=concurrency)
    busy_tokens = sum(at <= busy_end_s for answer in answers for at in answer.token_times_s)
    busy_s = busy_end_s - start_s
    return {
        "requests": len(answers) + failed,
        "failed": failed,
        "output_tokens": sum(answer.num_tokens for answer in answers),
        "elapsed_s": end_s - start_s,
        "busy_s": busy_s,
        "tokens_per_s": busy_tokens / busy_s if busy_s > 0 else 0.0,
        "tokens_per_s_per_user": formulas.median(
            formulas.speed(
                num_tokens=answer.num_tokens,
                first_s=answer.token_times_s[0],
                last_s=answer.token_times_s[-1],
            )
            for answer in answers
            if answer.num_tokens >= min_speed_tokens
        ),
        "first_token_s": quantiles(first),
        "inter_token_s": quantiles(
            [gap for answer in answers for gap in inter_token_gaps(answer.token_times_s)]
        ),
        "acceptance_length": formulas.acceptance_length(rounds),
        "tokens_per_round": formulas.tokens_per_round(rounds),
    }


def busy_until(answers: Sequence[Answer], *, concurrency: int) -> float:
    """The first end that no further request follows: until then every slot was busy.

    It is the end after which fewer than `concurrency` are left to end.
    """
    ends = sorted(answer.ended_s for answer in answers)
    return ends[max(0, len(ends) - concurrency)] if ends else 0.0


def inter_token_gaps(token_times_s: Sequence[float]) -> list[float]:
    """One gap a token after the first chunk: the wait for its chunk over the tokens in it."""
    chunks = [(at, len(list(same))) for at, same in itertools.groupby(token_times_s)]
    return [
        (at - before) / tokens
        for (before, _), (at, tokens) in itertools.pairwise(chunks)
        for _ in range(tokens)
    ]


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """Median and 95th percentile (linear between values); None without a value."""
    if not values:
        return {"median": None, "p95": None}
    median, p95 = np.quantile(np.asarray(values), [0.5, 0.95])
    return {"median": float(median), "p95": float(p95)}
