"""Hidden states of every conversation: real vLLM -> Mooncake -> Parquet shards, checked on arrival.

With extract.mode cache, cost is one prefill of each conversation (SmolLM2: about 1.4 ms of two
cores a token, less where the server generated it) and tokens x planes x hidden x 2 bytes of disk,
printed before anything starts. Shards are closed every few seconds: after a SIGKILL only what was
not in a closed shard is asked again. With stream and tee, training asks for the states itself, and
this stage compares a few with transformers and lists the samples.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stages import contracts
from stages.contracts import Rejected
from stages.extract import estimate
from stages.journal import Journal
from stages.params import EngineParams, ExtractParams, Services
from stages.serving.launch import Endpoint, extract_servers
from stages.shards import SAMPLES_FILE, ShardWriter
from stages.states import canary, stream
from stages.states.receiver import Agreement
from stages.states.source import Sample
from stages.states.stream import Streamed, StreamedStates

AGREEMENTS = "agreements.jsonl"

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
    """Writes shards and samples.parquet. Raises ValueError for a budget, a service, a canary or a
    yield that does not fit."""
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
    wanted = unread_samples(rows, prompt_tokens=extract.prompt_tokens)
    writer = ShardWriter(
        work / "artifact",
        pieces=work / "pieces",
        num_planes=num_planes,
        hidden_size=hidden_size,
        encoding=extract.encoding,
        shard_bytes=extract.shard_bytes,
    )
    if extract.mode != "stream":
        _check_bytes(wanted, writer, num_planes=num_planes, extract=extract)
    # The responses' temperature is the conversations' own fact; params.yaml may have moved on.
    greedy = manifest.recipe["params"]["generate"]["temperature"] == 0
    done = {sample["id"] for sample in writer.samples}
    # The last ones first: a server that generated them, and whose cache holds not all of them any
    # more, still has these.
    pending = [sample for sample in reversed(wanted) if sample["id"] not in done]
    rejected: dict[str, Rejected] = {}
    errors: list[float] | None = None
    with Journal(work / AGREEMENTS) as agreements:
        if pending:
            torch.set_num_threads(services.extract.num_threads)
            with (
                extract_servers(
                    target=target, engine=engine, extract=extract, services=services
                ) as endpoints,
                stream.opened(
                    endpoints,
                    target=target,
                    engine=engine,
                    extract=extract,
                    services=services,
                    key_prefix=f"dspark-{contracts.fingerprint(recipe)[:16]}",
                    greedy=greedy,
                    num_samples=len(wanted),
                ) as source,
            ):
                errors = _check_canary(
                    source, pending, extract, target, target_manifest, endpoints=endpoints
                )
                if extract.mode == "cache":
                    _receive_all(source, pending, writer=writer, agreements=agreements)
                    rejected = source.rejected
        counted = {row["id"]: row for row in agreements.rows}
    agreement = Agreement(
        agreed=sum(row["agreed"] for row in counted.values()),
        judged=sum(row["judged"] for row in counted.values()),
    )
    agreement.check()
    counts = contracts.write_rejects(
        work / "artifact",
        contracts.reject_rows(rejected),
    )
    samples = wanted
    if extract.mode == "cache":
        kept = {sample["id"]: sample for sample in writer.samples}
        samples = [kept[sample["id"]] for sample in wanted if sample["id"] in kept]
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
                "mode": extract.mode,
                "layer_ids": list(extract.layer_ids),
                "num_planes": num_planes,
                "hidden_size": hidden_size,
                "encoding": extract.encoding,
                "last_plane": "output of the last decoder layer, before the final norm",
                "bytes_per_token": contracts.token_bytes(num_planes, hidden_size, extract.encoding),
                "target_content": target_manifest.content,
                **{
                    name: target_manifest.info[name]
                    for name in ("tokenizer_sha256", "chat_template_sha256", "weights_sha256")
                },
                "greedy": greedy,
                "greedy_agreement": agreement.share if agreement.judged else None,
                "greedy_tokens_judged": agreement.judged,
                "canary_relative_errors": errors,
            },
        ),
    )
    contracts.publish(work / "artifact", out)
    shutil.rmtree(work)
    if extract.mode != "cache":
        print(f"extract: {len(samples)} samples listed for training to {extract.mode}")
        return
    agreed = f"; logits agree with {agreement.share:.1%} of the greedy tokens" if greedy else ""
    print(f"extract: {len(samples)} samples, {sum(counts.values())} rejected{agreed}")


def unread_samples(rows: Sequence[Row], *, prompt_tokens: bool) -> list[Sample]:
    """Rows of contracts.SAMPLES whose states are still to come."""
    start = shared_prefix(rows) if prompt_tokens else None
    names = ("id", "domain", "split", "looping", "input_ids", "loss_mask")
    return [
        {
            **{name: row[name] for name in names},
            "num_tokens": len(row["input_ids"]),
            "supervised": _supervised(row["loss_mask"], start),
            "log_sum_exp": [],
            "sha256": "",
            "shard": -1,
            "row_group": -1,
        }
        for row in rows
    ]


def _supervised(loss_mask: list[bool], start: int | None) -> list[bool]:
    """loss_mask, and with `start` every token from there up to the last with loss."""
    if start is None:
        return loss_mask
    end = len(loss_mask) - loss_mask[::-1].index(True) if any(loss_mask) else 0
    return [own or start <= i < end for i, own in enumerate(loss_mask)]


def shared_prefix(rows: Sequence[Row]) -> int:
    """How many tokens all conversations begin with: the template's and a system prompt."""
    first, *others = (row["input_ids"] for row in rows)
    shared = len(first)
    for other in others:
        pairs = zip(first[:shared], other, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(shared, len(other)))
    return shared


def _check_bytes(
    wanted: list[Sample], writer: ShardWriter, *, num_planes: int, extract: ExtractParams
) -> None:
    """Prints the estimate and refuses what is above the budget or does not fit on the disk."""
    num_tokens = sum(sample["num_tokens"] for sample in wanted)
    each = contracts.token_bytes(num_planes, writer.hidden_size, extract.encoding)
    needed = num_tokens * each
    written = sum(sample["num_tokens"] for sample in writer.samples) * each
    free = shutil.disk_usage(writer.folder).free
    print(
        f"extract: {num_tokens:,} tokens x {each:,} bytes ({num_planes} planes of "
        f"{writer.hidden_size}, {extract.encoding}) = {needed / 1e9:.2f} GB (budget "
        f"{extract.byte_budget / 1e9:.2f} GB, {written / 1e9:.2f} GB already there, "
        f"{free / 1e9:.0f} GB free)",
        flush=True,
    )
    estimate.check_bytes(needed, budget=extract.byte_budget, written=written, free=free)


def _check_canary(
    source: StreamedStates,
    pending: Sequence[Sample],
    extract: ExtractParams,
    target: Path,
    target_manifest: contracts.Manifest,
    *,
    endpoints: Sequence[Endpoint],
) -> list[float] | None:
    """The canary's errors by plane; compulsory for servers that somebody else runs."""
    given = [endpoint.url for endpoint in endpoints if endpoint.log is None]
    if not extract.canary_samples:
        if given:
            raise ValueError(
                f"extract.canary_samples is 0, but {given[0]} is a given server: its states must "
                "be compared with the target's; set it to 1 or more"
            )
        return None
    return canary.check(
        source,
        canary.chosen(pending, count=extract.canary_samples),
        target=target,
        layer_ids=extract.layer_ids,
        limit=extract.canary_limit,
        trust_remote_code=target_manifest.recipe["params"]["target"]["trust_remote_code"],
    )


def _receive_all(
    source: StreamedStates,
    pending: Sequence[Sample],
    *,
    writer: ShardWriter,
    agreements: Journal,
) -> None:
    """Writes what arrives; what was written is in closed shards even where this raises."""
    num_tokens = sum(sample["num_tokens"] for sample in pending)
    try:
        with (
            source.read(pending) as states,
            tqdm(total=num_tokens, desc="extract", unit="tok", mininterval=1.0) as progress,
        ):
            for sample, loaded in zip(pending, states, strict=True):
                if loaded is not None:
                    assert isinstance(loaded, Streamed)
                    received = loaded.received
                    writer.append(
                        received.payload,
                        {
                            **sample,
                            "log_sum_exp": received.log_sum_exp.tolist(),
                            "sha256": received.sha256,
                        },
                    )
                    agreements.append(
                        {
                            "id": sample["id"],
                            "agreed": received.agreed,
                            "judged": received.judged,
                        }
                    )
                progress.set_postfix_str(f"{len(source.rejected)} rejected", refresh=False)
                progress.update(sample["num_tokens"])
    finally:
        writer.close()
    if source.retried:
        print(f"extract: asked again or given up, by reason: {source.retried}")
