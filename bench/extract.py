"""Tokens a CPU-second of hidden-state extraction, against plain prefill (bench-extract).

On the same prompts, alternating: (a) a plain vLLM server that only prefills (max_tokens 1); (b) our
extract stage's path into Parquet shards, with the log-sum-exp of every response token and without
(states only: the share of the former falls as a target grows beside its vocabulary); (c) our stream
into a consumer that checks and deletes; (d) transformers in this process, batched, with the same
planes kept. CPU-seconds are of the server's process group and of this process, Mooncake's master
included. Prompts are new in every round and prefix caching is off. The last line is JSON.
Cost: about six minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import states as real
from stages.params import Params, Services, load_params, load_services
from stages.serving import plans, process
from stages.serving.client import run_bounded
from stages.serving.launch import Endpoint
from stages.serving.pool import Pool
from stages.shards import ShardWriter
from stages.states import stream
from stages.states.stream import Streamed, StreamedStates

CONTENDERS = ("prefill", "cache", "cache_states_only", "stream", "transformers")
FOLDER = real.SCRATCH / "extract"
_TICKS = os.sysconf("SC_CLK_TCK")


class Side(NamedTuple):
    """A contender: what it does with a round's rows, and the supervisors of its processes."""

    run: Callable[[list[list[int]]], None]
    supervisors: list[int]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.extract", description=__doc__)
    parser.add_argument("--rows", type=int, default=60, help="prompts a round")
    parser.add_argument("--tokens", type=int, default=200, help="mean of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--services", type=Path, default=Path("services.yaml"))
    options = parser.parse_args(arguments)
    params, services = load_params(options.params), load_services(options.services)
    torch.set_num_threads(services.extract.num_threads)
    target = real.make_target(params)
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with ExitStack() as stack:
        sides = build(stack, params, services, target)
        for index in range(-1, options.rounds):  # the first one warms up
            rows = real.token_rows(
                target, count=options.rows, num_tokens=options.tokens, seed=index + 1
            )
            for name, side in sides.items():
                rate = sum(map(len, rows)) / cpu_seconds(side, rows)
                if index >= 0:
                    rates[name].append(rate)
            print(f"round {index}: " + ", ".join(f"{k} {v[-1]:.0f}" for k, v in rates.items() if v))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    print(
        json.dumps(
            {
                "tokens_per_cpu_second": {name: round(x, 1) for name, x in middle.items()},
                "cache_over_prefill": ratio(rates, "cache", "prefill"),
                "cache_states_only_over_prefill": ratio(rates, "cache_states_only", "prefill"),
                "stream_over_prefill": ratio(rates, "stream", "prefill"),
                "cache_over_transformers": ratio(rates, "cache", "transformers"),
                "rounds": options.rounds,
                "tokens_per_round": sum(map(len, rows)),
            }
        )
    )


def ratio(rates: dict[str, list[float]], ours: str, theirs: str) -> float:
    """Median over rounds of the quotient within a round."""
    pairs = zip(rates[ours], rates[theirs], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)


def build(stack: ExitStack, params: Params, services: Services, target: Path) -> dict[str, Side]:
    master = stack.enter_context(
        process.held("bench-mooncake", plans.mooncake_plan(services), owner=None)
    )
    address = f"{master.host}:{master.port}"

    def serve(role: str, planes: plans.Planes | None) -> tuple[process.Service, Endpoint]:
        plan = plans.target_plan(
            target,
            engine=params.engine,
            services=services,
            planes=planes,
            master=address if planes else None,
            seed=None,
        )
        command = [word for word in plan.command if word != "--enable-prefix-caching"]
        plan = replace(plan, command=[*command, "--no-enable-prefix-caching"])
        service = stack.enter_context(process.held(role, plan, owner=None))
        url = f"http://{service.host}:{service.port}"
        return service, Endpoint(url, plan.name, Path(service.log), address)

    plain, plain_endpoint = serve("bench-plain", None)
    extracting, extract_endpoint = serve("bench-extract", plans.Planes.of(params.extract))
    source = stack.enter_context(
        stream.opened(
            [extract_endpoint],
            target=target,
            engine=params.engine,
            extract=params.extract,
            services=services,
            key_prefix="dspark-bench",
            greedy=False,
            num_samples=10**9,
        )
    )
    model = real.load_model(target)
    layer_ids = params.extract.layer_ids
    ours = [extracting.supervisor, master.supervisor]
    return {
        "prefill": Side(lambda rows: prefill(plain_endpoint, rows, services), [plain.supervisor]),
        "cache": Side(lambda rows: to_shards(source, rows, params, supervised=0.5), ours),
        "cache_states_only": Side(
            lambda rows: to_shards(source, rows, params, supervised=0.0), ours
        ),
        "stream": Side(lambda rows: to_nothing(source, rows), ours),
        "transformers": Side(lambda rows: in_process(model, rows, layer_ids), []),
    }


def prefill(endpoint: Endpoint, rows: list[list[int]], services: Services) -> None:
    async def run() -> None:
        async with Pool.of([endpoint], services.vllm) as pool:

            async def one(row: list[int]) -> Any:
                return await pool.complete(row, max_tokens=1, temperature=0.0)

            async for _ in run_bounded(rows, one, concurrency=services.extract.concurrency):
                pass

    asyncio.run(run())


def to_shards(
    source: StreamedStates, rows: list[list[int]], params: Params, *, supervised: float
) -> None:
    """As the extract stage does; `supervised` of each row is the target's own response."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    writer = ShardWriter(
        FOLDER / "shards",
        pieces=FOLDER / "pieces",
        num_planes=source.num_planes,
        hidden_size=source.hidden_size,
        shard_bytes=params.extract.shard_bytes,
        encoding=params.extract.encoding,
    )
    samples = [real.sample(index, row, supervised=supervised) for index, row in enumerate(rows)]
    with source.read(samples) as states:
        for one, loaded in zip(samples, states, strict=True):
            assert isinstance(loaded, Streamed)
            sums = loaded.log_sum_exp.tolist()
            sha256 = loaded.received.sha256
            row = {**one, "log_sum_exp": sums, "sha256": sha256}
            writer.append(loaded.received.payload, row)
    writer.close()
    assert len(writer.samples) == len(rows)
    shutil.rmtree(FOLDER)


def to_nothing(source: StreamedStates, rows: list[list[int]]) -> None:
    samples = [real.sample(index, row, supervised=0.0) for index, row in enumerate(rows)]
    with source.read(samples) as states:
        assert sum(loaded is not None for loaded in states) == len(rows)


def in_process(model: Any, rows: list[list[int]], layer_ids: Sequence[int]) -> None:
    ordered = sorted(rows, key=len)
    assert len(list(real.planes(model, ordered, layer_ids, batch_rows=8))) == len(rows)


def cpu_seconds(side: Side, rows: list[list[int]]) -> float:
    """CPU time that this process and the side's servers spend on the rows."""

    def spent() -> float:
        own = resource.getrusage(resource.RUSAGE_SELF)
        return own.ru_utime + own.ru_stime + sum(map(tree_seconds, side.supervisors))

    before = spent()
    side.run(rows)
    time.sleep(0.2)  # the server ends its last step
    return spent() - before


def tree_seconds(pid: int) -> float:
    """User and system time of a process, of its living descendants and of dead children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return 0.0
    own = sum(int(value) for value in fields[11:15]) / _TICKS
    return own + sum(map(tree_seconds, children))


if __name__ == "__main__":
    main(sys.argv[1:])
