"""What is asked of the servers, and how. Every row is appended to a journal as soon as it is known,
so a stage that was killed asks again only what it had not finished.

Acceptance: all prompts, several in flight, with the drafter. Speed: one prompt at a time on both
engines back to back, alternating which goes first, streamed, temperature 0.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from stages.evaluate import formulas
from stages.evaluate.prompts import Prompt
from stages.journal import Journal
from stages.serving.client import Client, Completion, EndpointError, run_bounded
from stages.serving.launch import Endpoint

DRAFTS, DRAFTED, ACCEPTED = COUNTERS = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)
ATTEMPTS = 2
MAX_FAILURES = 3  # then the server is taken for dead and nothing more is asked
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Setting:
    """How every request is made."""

    max_tokens: int
    timeout_s: float
    warm_up: Sequence[int]  # a prompt that is measured nowhere

    def client(self, endpoint: Endpoint) -> Client:
        return Client(endpoint.url, model=endpoint.model, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class Failure:
    """A request that failed in every attempt."""

    id: str
    reason: str


async def measure_acceptance(
    prompts: Sequence[Prompt],
    *,
    endpoint: Endpoint,
    setting: Setting,
    temperature: float,
    concurrency: int,
    journal: Journal,
    sessions: Journal,
) -> None:
    """Appends a row a prompt to `journal` and one about the session (counters) to `sessions`.

    Raises ValueError when requests fail twice or the server reports no acceptance.
    """
    failures: list[Failure] = []
    retries: list[str] = []
    rows: list[dict[str, Any]] = []
    async with setting.client(endpoint) as client:
        await client.complete(setting.warm_up, max_tokens=WARM_UP_TOKENS, temperature=0.0)
        before = formulas.parse_counters(await client.metrics())
        started = time.monotonic()

        async def one(prompt: Prompt) -> Completion | Failure:
            request = functools.partial(
                client.complete,
                prompt.token_ids,
                max_tokens=setting.max_tokens,
                temperature=temperature,
            )
            return await _attempt(request, prompt=prompt, retries=retries)

        with tqdm(total=len(prompts), desc="acceptance", unit="prompt") as progress:
            async for prompt, answer in run_bounded(prompts, one, concurrency=concurrency):
                progress.update()
                if isinstance(answer, Failure):
                    failures.append(answer)
                    if len(failures) == MAX_FAILURES:
                        raise_failures(failures, of=len(prompts))
                    continue
                row = _acceptance_row(prompt, answer, url=endpoint.url)
                rows.append(row)
                journal.append(row)
        elapsed_s = time.monotonic() - started
        after = formulas.parse_counters(await client.metrics())
    grown = formulas.counter_difference(before, after, names=COUNTERS)
    sessions.append(
        {
            "temperature": temperature,
            "prompts": len(rows),
            "elapsed_s": elapsed_s,
            "output_tokens": sum(row["num_tokens"] for row in rows),
            "retries": retries,
            "failed": len(failures),
            "counters": grown,
            "per_request": {
                DRAFTS: sum(len(row["drafted"]) for row in rows),
                DRAFTED: sum(sum(row["drafted"]) for row in rows),
                ACCEPTED: sum(sum(row["accepted"]) for row in rows),
            },
        }
    )
    raise_failures(failures, of=len(prompts))


async def measure_speed(
    prompts: Sequence[Prompt],
    *,
    drafter: Endpoint,
    baseline: Endpoint,
    setting: Setting,
    journal: Journal,
) -> None:
    """Appends a row a prompt; a resumed journal's alternation goes on.

    Raises ValueError when requests fail twice.
    """
    failures: list[Failure] = []
    retries: list[str] = []
    first_index = len(journal.rows)
    async with setting.client(drafter) as with_drafter, setting.client(baseline) as plain:
        clients = {"drafter": with_drafter, "baseline": plain}
        for client in clients.values():
            await client.complete(setting.warm_up, max_tokens=WARM_UP_TOKENS, temperature=0.0)
        for index, prompt in enumerate(
            tqdm(prompts, desc="speed", unit="prompt"), start=first_index
        ):
            order = ["drafter", "baseline"] if index % 2 else ["baseline", "drafter"]
            row: dict[str, Any] = {"id": prompt.id, "domain": prompt.domain, "order": order}
            for engine in order:
                request = functools.partial(
                    clients[engine].complete,
                    prompt.token_ids,
                    max_tokens=setting.max_tokens,
                    temperature=0.0,
                    stream=True,
                )
                answer = await _attempt(request, prompt=prompt, retries=retries)
                if isinstance(answer, Failure):
                    failures.append(answer)
                    if len(failures) == MAX_FAILURES:
                        raise_failures(failures, of=2 * len(prompts))
                    break
                row[engine] = _timing(answer)
            else:
                journal.append({**row, "retries": [r for r in retries if r.startswith(prompt.id)]})
    raise_failures(failures, of=2 * len(prompts))


async def switch_scheduler(endpoint: Endpoint, scheduler: str, *, setting: Setting) -> None:
    """Another draft rule for a server of ours in development mode."""
    async with setting.client(endpoint) as client:
        await client.call("switch_draft_scheduler", scheduler)


def check_session(session: dict[str, Any], *, block_size: int, shared: bool) -> list[str]:
    """Compares vLLM's counters with the sums over requests; returns warnings, best none.

    They count the same rounds, so they may differ by a request's last block at most; a server that
    serves others too (`shared`), and retried requests, explain more. Raises ValueError otherwise.
    """
    counters, requests = session["counters"], session["per_request"]
    differences = {name: counters[name] - requests[name] for name in COUNTERS}
    if not any(differences.values()):
        return []
    text = (
        f"vLLM's counters and the sum over {session['prompts']} requests differ: {differences} "
        f"(counters {counters}, requests {requests})"
    )
    allowed = session["prompts"]
    beyond = abs(differences[DRAFTS]) > allowed or any(
        abs(differences[name]) > allowed * block_size for name in (DRAFTED, ACCEPTED)
    )
    if beyond and not (shared or session["retries"] or session["failed"]):
        raise ValueError(f"{text}; more than one block a request")
    return [text]


def raise_failures(failures: Sequence[Failure], *, of: int) -> None:
    """Raises ValueError with the first reasons, unless there is none."""
    if failures:
        reasons = "\n".join(
            f"  {failure.id}: {failure.reason}" for failure in failures[:MAX_FAILURES]
        )
        raise ValueError(
            f"evaluate: {len(failures)} of {of} requests failed {ATTEMPTS} times each:\n{reasons}\n"
            "the results of the others are kept; run the stage again once the server is well"
        )


async def _attempt(
    request: Callable[[], Awaitable[Completion]], *, prompt: Prompt, retries: list[str]
) -> Completion | Failure:
    reason = ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await request()
        except EndpointError as error:
            reason = str(error)
            if attempt < ATTEMPTS:
                retries.append(f"{prompt.id}: {reason}")
                await asyncio.sleep(1.0)
    return Failure(prompt.id, reason)


def _acceptance_row(prompt: Prompt, answer: Completion, *, url: str) -> dict[str, Any]:
    if answer.speculative is None:
        raise ValueError(
            f"the drafter server at {url} reports no acceptance per request; start it with "
            "--speculative-config and --per-request-spec-decode-metrics detailed"
        )
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "prompt_tokens": len(prompt.token_ids),
        "token_ids": answer.token_ids,
        "num_tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "elapsed_s": answer.elapsed_s,
        "drafted": list(answer.speculative.drafted),
        "accepted": list(answer.speculative.accepted),
    }


def _timing(answer: Completion) -> dict[str, Any]:
    times, rounds = answer.token_times_s, answer.speculative
    return {
        "num_tokens": len(answer.token_ids),
        "first_s": times[0] if times else None,
        "last_s": times[-1] if times else None,
        "finish_reason": answer.finish_reason,
        "drafted": list(rounds.drafted) if rounds else [],
        "accepted": list(rounds.accepted) if rounds else [],
    }
