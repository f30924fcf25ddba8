"""Served speed: a plain engine, and one with the packaged drafter under every draft rule, in turn.

Two servers are up, the plain one and ours; an idle one takes no core. At every concurrency the same
mixed-domain prompts go, in each round, to each contender, the order rotated: `plain`, and our
server told to draft nothing (`none`), a fixed block (`fixed`), up to a static threshold
(`threshold`) and by confidence and load (`prefix`). Ratios are taken within a round, and their
median counts. At concurrency 1 the ratio is of each prompt's speed (tokens/s/user), by domain. The
last line is JSON. Cost: about 20 minutes on two cores.

It takes data/target, data/prompts and the package of the last `make retrain`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from stages.evaluate import formulas, load
from stages.evaluate.prompts import Prompt, read_prompts, room, spread
from stages.params import DOMAINS, Params, load_params, load_services
from stages.serving.client import Client
from stages.serving.launch import Endpoint, vllm_server
from stages.serving.serve import drafter_arguments
from stages.serving.speculative import read_drafter_config

PLAIN = "plain"
RULES = ("none", "fixed", "threshold", "prefix")
CONTENDERS = (PLAIN, *RULES)
PER_DOMAIN = 4
REQUESTS = {1: 9, 2: 18, 4: 18, 8: 36, 16: 72}  # a round


class Measured(NamedTuple):
    """One contender's round at one concurrency."""

    tokens_per_s: float
    speeds: dict[str, float]  # tokens/s/user by prompt
    first_token_s: float
    statistics: dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.serve", description=__doc__)
    parser.add_argument("--package", type=Path, default=Path("package"))
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--prompts", type=Path, default=Path("data/prompts"))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrencies", type=int, nargs="+", default=list(REQUESTS))
    options = parser.parse_args(arguments)
    params, services = load_params(), load_services()
    prompts = evaluation_prompts(options, params)
    with ExitStack() as stack:

        def serve(role: str, given: Sequence[str], environment: dict[str, str]) -> Endpoint:
            return stack.enter_context(
                vllm_server(
                    role=role,
                    model=options.target,
                    engine=params.engine,
                    services=services,
                    arguments=["--no-enable-prefix-caching", *given],
                    environment=environment,
                )
            )

        plain = serve("bench-plain", [], {})
        # Loopback alone can reach the route that switches rules (services.yaml's host aside).
        flags = drafter_arguments(
            options.package, serve=params.serve.model_copy(update={"scheduler": "prefix"})
        )
        drafter = serve("bench-drafter", flags, {"VLLM_SERVER_DEV_MODE": "1"})
        found = asyncio.run(
            compare(
                prompts,
                plain=plain,
                drafter=drafter,
                timeout_s=services.vllm.request_timeout_s,
                options=options,
            )
        )
    print(json.dumps(summary(found, prompts)))


def evaluation_prompts(options: argparse.Namespace, params: Params) -> list[Prompt]:
    """PER_DOMAIN of each evaluation set, the domains in turn."""
    chosen, _ = read_prompts(
        options.prompts,
        target=options.target,
        evaluate=params.evaluate.model_copy(update={"prompts_per_domain": PER_DOMAIN}),
        chat_template_kwargs=params.generate.chat_template_kwargs,
        longest=room(
            max_model_len=params.engine.max_model_len,
            max_tokens=options.max_tokens,
            block_size=read_drafter_config(options.package).block_size,
        ),
    )
    return spread(chosen, count=len(chosen))


async def compare(
    prompts: list[Prompt],
    *,
    plain: Endpoint,
    drafter: Endpoint,
    timeout_s: float,
    options: argparse.Namespace,
) -> dict[int, dict[str, list[Measured]]]:
    """By concurrency and contender, a measurement a round."""
    found: dict[int, dict[str, list[Measured]]] = {}
    async with (
        Client(plain.url, model=plain.model, timeout_s=timeout_s) as without,
        Client(drafter.url, model=drafter.model, timeout_s=timeout_s) as ours,
    ):
        for client in (without, ours):
            await load.run_load(client, prompts[:4], engine="warm-up", concurrency=2, max_tokens=32)
        for concurrency in options.concurrencies:
            rounds: dict[str, list[Measured]] = {name: [] for name in CONTENDERS}
            for index in range(options.rounds):
                asked = chosen(prompts, concurrency=concurrency, index=index)
                for name in CONTENDERS[index:] + CONTENDERS[:index]:
                    client = without if name == PLAIN else ours
                    if name != PLAIN:
                        await ours.call("switch_draft_scheduler", name)
                        await ours.call("take_draft_statistics")
                    answers, failures = await load.run_load(
                        client,
                        asked,
                        engine=name,
                        concurrency=concurrency,
                        max_tokens=options.max_tokens,
                    )
                    if failures:
                        raise ValueError(f"bench-serve: {name} failed: {failures[0]}")
                    taken = {} if name == PLAIN else await ours.call("take_draft_statistics")
                    rounds[name].append(measured(answers, asked, concurrency, taken))
            found[concurrency] = rounds
            print(
                f"concurrency {concurrency}: "
                + ", ".join(
                    f"{name} {statistics.median(m.tokens_per_s for m in rounds[name]):.1f}"
                    for name in CONTENDERS
                )
                + " tokens/s",
                flush=True,
            )
    return found


def chosen(prompts: Sequence[Prompt], *, concurrency: int, index: int) -> list[Prompt]:
    """A round's prompts: every round takes others first, and all domains alike."""
    start = index * len(DOMAINS)
    turned = [*prompts[start:], *prompts[:start]]
    number = REQUESTS.get(concurrency, 3 * concurrency)
    return [turned[i % len(turned)] for i in range(number)]


def measured(
    answers: Sequence[load.Answer],
    asked: Sequence[Prompt],
    concurrency: int,
    taken: dict[str, Any],
) -> Measured:
    side = load.side(answers, failed=0, concurrency=concurrency, min_speed_tokens=2)
    speeds = {}
    # At concurrency 1 answers come in the order of asking.
    for prompt, answer in zip(asked, answers, strict=True) if concurrency == 1 else ():
        speed = formulas.speed(
            num_tokens=answer.num_tokens,
            first_s=answer.token_times_s[0],
            last_s=answer.token_times_s[-1],
        )
        if speed is not None and answer.num_tokens >= 32:
            speeds[prompt.id] = speed
    return Measured(side["tokens_per_s"], speeds, side["first_token_s"]["median"], taken)


def summary(
    found: dict[int, dict[str, list[Measured]]], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    def over(ours: str, theirs: str, rounds: dict[str, list[Measured]]) -> float:
        pairs = zip(rounds[ours], rounds[theirs], strict=True)
        return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)

    def over_best(rounds: dict[str, list[Measured]]) -> float:
        best = max(("fixed", "none"), key=lambda name: middle(rounds[name]))
        return over("prefix", best, rounds)

    def middle(rounds: Sequence[Measured]) -> float:
        return statistics.median(one.tokens_per_s for one in rounds)

    def by_concurrency(value: Any) -> dict[str, float]:
        return {str(n): round(value(rounds), 3) for n, rounds in found.items()}

    body: dict[str, Any] = {}
    if 1 in found:
        domains = speedups(found[1], prompts)
        body["speedup_math_c1"] = domains["math_reasoning"]
        macro = statistics.geometric_mean(ratio for ratio in domains.values() if ratio)
        body["speedup_macro_c1"] = round(macro, 3)
        body["speedup_c1"] = domains
    body |= {
        "scheduler_over_best": by_concurrency(over_best),
        "scheduler_over_plain": by_concurrency(lambda rounds: over("prefix", PLAIN, rounds)),
        "idle_drafter_cost": by_concurrency(lambda rounds: 1 - over("none", PLAIN, rounds)),
        "tokens_per_s": {
            name: {str(n): round(middle(rounds[name]), 1) for n, rounds in found.items()}
            for name in CONTENDERS
        },
        "first_token_s": {
            name: {
                str(n): round(statistics.median(m.first_token_s for m in rounds[name]), 3)
                for n, rounds in found.items()
            }
            for name in (PLAIN, "prefix")
        },
        "drafted_rounds": by_concurrency(lambda r: share(r["prefix"], "drafted_rounds", "rounds")),
        "decision_share": by_concurrency(lambda r: share(r["prefix"], "decision_s", "elapsed_s")),
        "draft_share": by_concurrency(lambda r: share(r["prefix"], "draft_s", "elapsed_s")),
    }
    return body


def speedups(
    rounds: dict[str, list[Measured]], prompts: Sequence[Prompt]
) -> dict[str, float | None]:
    """Median over a domain's prompts of the speed with the scheduler over the plain one."""
    domain_of = {prompt.id: prompt.domain for prompt in prompts}
    ratios: dict[str, list[float]] = {name: [] for name in DOMAINS}
    for ours, plain in zip(rounds["prefix"], rounds[PLAIN], strict=True):
        for name in ours.speeds.keys() & plain.speeds.keys():
            ratios[domain_of[name]].append(ours.speeds[name] / plain.speeds[name])
    return {
        name: round(statistics.median(found), 3) if found else None
        for name, found in ratios.items()
    }


def share(rounds: Sequence[Measured], part: str, whole: str) -> float:
    total = sum(one.statistics[whole] for one in rounds)
    return sum(one.statistics[part] for one in rounds) / total if total else 0.0


if __name__ == "__main__":
    main(sys.argv[1:])
