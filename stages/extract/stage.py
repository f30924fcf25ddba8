"""Hidden states of every conversation: real vLLM -> Mooncake -> Parquet shards, checked on arrival.

Cost: one prefill of each conversation (SmolLM2: about 1.4 ms of two cores a token) and
tokens x planes x hidden x 2 bytes of disk, printed before anything starts. Shards are closed every
few seconds: after a SIGKILL only what was not in a closed shard is asked again.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from stages import contracts
from stages.extract import estimate
from stages.extract.receiver import Agreement, Receiver, Rejected
from stages.journal import Journal
from stages.params import EngineParams, ExtractParams, Services
from stages.serving import wire
from stages.serving.client import Client, run_bounded
from stages.serving.launch import Endpoint, extract_server
from stages.serving.store import Store, StoreSettings
from stages.shards import SAMPLES_FILE, ShardWriter
from stages.weights import load_target_weights

AGREEMENTS = "agreements.jsonl"
_STORE_SHARE = 0.8  # of the producer's segment that samples in flight may fill

Row = dict[str, Any]  # of contracts.CONVERSATIONS


def run(
    *,
    engine: EngineParams,
    extract: ExtractParams,
    services: Services,
    target: Path,
    conversations: Path,
    out: Path,
) -> None:
    """Writes shards and samples.parquet. Raises ValueError for a budget, a service or a yield that
    does not fit."""
    target_manifest = contracts.read_manifest(target, "target")
    manifest = contracts.read_manifest(conversations, "generate")
    recipe = contracts.recipe(
        {"engine": engine, "extract": extract},
        {"target": target_manifest, "conversations": manifest},
    )
    work = contracts.working_folder("extract", recipe)
    rows = contracts.read_table(conversations / "conversations.parquet", contracts.CONVERSATIONS)
    num_planes = len(extract.layer_ids) + 1
    hidden_size = int(target_manifest.info["hidden_size"])
    writer = ShardWriter(
        work / "artifact",
        pieces=work / "pieces",
        num_planes=num_planes,
        hidden_size=hidden_size,
        shard_bytes=extract.shard_bytes,
    )
    _check_bytes(rows, writer, num_planes=num_planes, hidden_size=hidden_size, extract=extract)
    prompt_start = shared_prefix(rows) if extract.prompt_tokens else None
    # The responses' temperature is the conversations' own fact; params.yaml may have moved on.
    greedy = manifest.recipe["params"]["generate"]["temperature"] == 0
    done = {sample["id"] for sample in writer.samples}
    # The last ones first: a server that generated them, and whose cache holds not all of them any
    # more, still has these.
    pending = [row for row in reversed(rows) if row["id"] not in done]
    rejected: dict[str, Rejected] = {}
    with Journal(work / AGREEMENTS) as agreements:
        if pending:
            rejected = _extract(
                pending,
                writer=writer,
                agreements=agreements,
                greedy=greedy,
                prompt_start=prompt_start,
                target=target,
                engine=engine,
                extract=extract,
                services=services,
                key_prefix=f"dspark-{contracts.fingerprint(recipe)[:16]}",
            )
        counted = {row["id"]: row for row in agreements.rows}
    agreement = Agreement(
        agreed=sum(row["agreed"] for row in counted.values()),
        judged=sum(row["judged"] for row in counted.values()),
    )
    agreement.check()
    counts = contracts.write_rejects(
        work / "artifact",
        [
            {"id": name, "reason": refusal.reason, "detail": refusal.detail}
            for name, refusal in sorted(rejected.items())
        ],
    )
    kept = {sample["id"]: sample for sample in writer.samples}
    samples = [kept[row["id"]] for row in rows if row["id"] in kept]
    contracts.check_yield(
        "extract", kept=len(samples), rejected=counts, limit=extract.max_rejected_fraction
    )
    contracts.write_table(work / "artifact" / SAMPLES_FILE, samples, contracts.SAMPLES)
    contracts.write_manifest(
        work / "artifact",
        contracts.Manifest(
            kind="extract",
            recipe=recipe,
            counts={
                "samples": len(samples),
                "tokens": sum(sample["num_tokens"] for sample in samples),
                "loss_tokens": sum(sum(sample["loss_mask"]) for sample in samples),
                "supervised_tokens": sum(sum(sample["supervised"]) for sample in samples),
                "shards": 1 + max(sample["shard"] for sample in samples),
            },
            rejected=counts,
            info={
                "layer_ids": list(extract.layer_ids),
                "num_planes": num_planes,
                "hidden_size": hidden_size,
                "dtype": "bfloat16",
                "last_plane": "output of the last decoder layer, before the final norm",
                "bytes_per_token": num_planes * hidden_size * 2,
                "target_content": target_manifest.content,
                **{
                    name: target_manifest.info[name]
                    for name in ("tokenizer_sha256", "chat_template_sha256", "weights_sha256")
                },
                "greedy_agreement": agreement.share if greedy else None,
                "greedy_tokens_judged": agreement.judged,
            },
        ),
    )
    contracts.publish(work / "artifact", out)
    shutil.rmtree(work)
    agreed = f"; logits agree with {agreement.share:.1%} of the greedy tokens" if greedy else ""
    print(f"extract: {len(samples)} samples, {sum(counts.values())} rejected{agreed}")


def shared_prefix(rows: Sequence[Row]) -> int:
    """How many tokens all conversations begin with: the template's and a system prompt."""
    first, *others = (row["input_ids"] for row in rows)
    shared = len(first)
    for other in others:
        pairs = zip(first[:shared], other, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(shared, len(other)))
    return shared


def _check_bytes(
    rows: list[Row],
    writer: ShardWriter,
    *,
    num_planes: int,
    hidden_size: int,
    extract: ExtractParams,
) -> None:
    """Prints the estimate and refuses what is above the budget or does not fit on the disk."""
    num_tokens = sum(len(row["input_ids"]) for row in rows)
    needed = estimate.states_bytes(
        num_tokens=num_tokens, num_planes=num_planes, hidden_size=hidden_size
    )
    written = estimate.states_bytes(
        num_tokens=sum(sample["num_tokens"] for sample in writer.samples),
        num_planes=num_planes,
        hidden_size=hidden_size,
    )
    free = shutil.disk_usage(writer.folder).free
    print(
        f"extract: {num_tokens:,} tokens x {num_planes} planes x {hidden_size} x 2 bytes = "
        f"{needed / 1e9:.2f} GB (budget {extract.byte_budget / 1e9:.2f} GB, {written / 1e9:.2f} GB "
        f"already there, {free / 1e9:.0f} GB free)",
        flush=True,
    )
    estimate.check_bytes(needed, budget=extract.byte_budget, written=written, free=free)


def _extract(
    pending: list[Row],
    *,
    writer: ShardWriter,
    agreements: Journal,
    greedy: bool,
    prompt_start: int | None,
    target: Path,
    engine: EngineParams,
    extract: ExtractParams,
    services: Services,
    key_prefix: str,
) -> dict[str, Rejected]:
    """Starts or finds the services and receives every pending row; the rejected ones, by id."""
    torch.set_num_threads(services.extract.num_threads)
    head = load_target_weights(target).head(
        torch.float32 if engine.dtype == "float32" else torch.bfloat16
    )
    num_planes, hidden_size = len(extract.layer_ids) + 1, head.norm_weight.shape[0]
    largest = wire.StatesShape(
        max(len(row["input_ids"]) for row in pending), num_planes, hidden_size
    ).object_bytes
    concurrency = _concurrency(largest, services=services)
    with extract_server(
        target=target, engine=engine, extract=extract, services=services
    ) as endpoint:
        assert endpoint.master is not None, "an extract server has a master"
        store = Store(
            StoreSettings.of(
                services.mooncake, master=endpoint.master, host=services.host, producer=False
            )
        )
        buffer = np.empty(largest, np.uint8)
        store.register(buffer.ctypes.data, largest)
        store.remove_prefix(key_prefix)  # what an interrupted run left pinned
        receiver = Receiver(
            store=store,
            buffer=buffer,
            writer=writer,
            head=head,
            num_planes=num_planes,
            hidden_size=hidden_size,
            key_prefix=key_prefix,
            max_attempts=extract.max_attempts,
            greedy=greedy,
            prompt_start=prompt_start,
            agreements=agreements,
        )
        try:
            return asyncio.run(
                _receive_all(
                    pending,
                    receiver=receiver,
                    endpoint=endpoint,
                    services=services,
                    concurrency=concurrency,
                )
            )
        finally:
            receiver.close()
            store.close()


def _concurrency(largest: int, *, services: Services) -> int:
    """Requests in flight: as services say, or as many as the store has room for."""
    segment = services.mooncake.segment_mib * 2**20
    room = int(segment * _STORE_SHARE) // largest
    if room == 0:
        raise ValueError(
            f"the largest sample has {largest:,} bytes, too many for mooncake.segment_mib="
            f"{services.mooncake.segment_mib} (services.yaml); raise it"
        )
    if room < services.extract.concurrency:
        print(
            f"extract: {room} requests in flight instead of {services.extract.concurrency}, as "
            "mooncake.segment_mib has no room for more"
        )
    return min(room, services.extract.concurrency)


async def _receive_all(
    pending: list[Row],
    *,
    receiver: Receiver,
    endpoint: Endpoint,
    services: Services,
    concurrency: int,
) -> dict[str, Rejected]:
    rejected: dict[str, Rejected] = {}
    async with Client(
        endpoint.url, model=endpoint.model, timeout_s=services.vllm.request_timeout_s
    ) as client:

        async def one(row: Row) -> Rejected | None:
            return await receiver.receive(row, client=client)

        num_tokens = sum(len(row["input_ids"]) for row in pending)
        with tqdm(total=num_tokens, desc="extract", unit="tok", mininterval=1.0) as progress:
            async for row, refusal in run_bounded(pending, one, concurrency=concurrency):
                if refusal is not None:
                    rejected[row["id"]] = refusal
                progress.set_postfix_str(f"{len(rejected)} rejected", refresh=False)
                progress.update(len(row["input_ids"]))
    if receiver.retried:
        print(f"extract: asked again or given up, by reason: {dict(receiver.retried)}")
    return rejected
