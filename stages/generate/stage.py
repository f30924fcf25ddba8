"""The target's own responses to the training and validation prompts, through a real vLLM server.

A drafter learns what the target says, so every loss token comes from the target. Cost: about 2 ms
of two cores a token with 32 requests in flight (SmolLM2). Responses are appended to a journal as
they arrive: after a SIGKILL only the requests in flight are asked again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages import contracts
from stages.contracts import Rejected
from stages.generate import conversations
from stages.journal import Journal
from stages.params import EngineParams, GenerateParams, Services
from stages.serving.chat import Renderer, RenderError
from stages.serving.client import Completion, RequestRefused, run_bounded
from stages.serving.launch import Endpoint, generate_servers
from stages.serving.pool import Pool

JOURNAL = "responses.jsonl"
PROMPT_FILES = (f"{contracts.TRAIN}.parquet", f"{contracts.VALIDATION}.parquet")

Prompt = dict[str, Any]  # a row of contracts.PROMPTS


def run(
    *,
    engine: EngineParams,
    generate: GenerateParams,
    services: Services,
    target: Path,
    prompts: Path,
    out: Path,
) -> None:
    """Writes conversations.parquet. Raises ValueError for a server or a yield that is not good."""
    target_manifest = contracts.read_manifest(target, "target")
    prompts_manifest = contracts.read_manifest(prompts, "prepare")
    recipe = contracts.recipe(
        {"engine": engine, "generate": generate},
        {"target": target_manifest, "prompts": prompts_manifest},
    )
    work = contracts.working_folder("generate", recipe)
    mask_token_id = int(target_manifest.info["mask_token_id"])
    rows = [
        prompt
        for name in PROMPT_FILES
        for prompt in contracts.read_table(prompts / name, contracts.PROMPTS)
    ]
    rendered, rejected = _render(
        rows, target=target, engine=engine, generate=generate, mask_token_id=mask_token_id
    )
    with Journal(work / JOURNAL) as journal:
        done = {row["id"] for row in journal.rows}
        pending = [prompt for prompt in rows if prompt["id"] in rendered.keys() - done]
        if pending:
            with generate_servers(
                target=target, engine=engine, generate=generate, services=services
            ) as endpoints:
                asyncio.run(
                    _ask(
                        pending,
                        rendered=rendered,
                        generate=generate,
                        services=services,
                        endpoints=endpoints,
                        journal=journal,
                    )
                )
        responses = {row["id"]: row for row in journal.rows}
    artifact = work / "artifact"
    shutil.rmtree(artifact, ignore_errors=True)
    artifact.mkdir()
    _finish(
        artifact,
        recipe=recipe,
        rows=rows,
        rendered=rendered,
        responses=responses,
        rejected=rejected,
        generate=generate,
        mask_token_id=mask_token_id,
    )
    contracts.publish(artifact, out)
    shutil.rmtree(work)


def _render(
    rows: list[Prompt],
    *,
    target: Path,
    engine: EngineParams,
    generate: GenerateParams,
    mask_token_id: int,
) -> tuple[dict[str, list[int]], dict[str, Rejected]]:
    """Token ids of each prompt that can be sent, and why the others cannot, by id."""
    renderer = Renderer(target)
    rendered: dict[str, list[int]] = {}
    rejected: dict[str, Rejected] = {}
    for prompt in rows:
        try:
            ids = renderer.render(
                json.loads(prompt["messages"]),
                tools=json.loads(prompt["tools"]) if prompt["tools"] else (),
                chat_template_kwargs=generate.chat_template_kwargs,
            )
        except RenderError as error:
            rejected[prompt["id"]] = Rejected("template_refused", str(error))
            continue
        refusal = conversations.check_prompt(
            ids,
            max_tokens=generate.max_tokens,
            max_model_len=engine.max_model_len,
            mask_token_id=mask_token_id,
        )
        if refusal is None:
            rendered[prompt["id"]] = ids
        else:
            rejected[prompt["id"]] = refusal
    return rendered, rejected


async def _ask(
    pending: list[Prompt],
    *,
    rendered: dict[str, list[int]],
    generate: GenerateParams,
    services: Services,
    endpoints: Sequence[Endpoint],
    journal: Journal,
) -> None:
    """Sends every pending prompt and appends {id, token_ids, finish_reason} or {id, refused}."""

    async def one(prompt: Prompt) -> Completion | RequestRefused:
        try:
            return await pool.complete(
                rendered[prompt["id"]],
                max_tokens=generate.max_tokens,
                temperature=generate.temperature,
                top_p=generate.top_p,
            )
        except RequestRefused as refusal:
            return refusal

    num_tokens = 0
    start = time.monotonic()
    async with Pool.of(endpoints, services.vllm) as pool:
        with tqdm(total=len(pending), desc="generate", unit="row", mininterval=1.0) as progress:
            async for prompt, answer in run_bounded(
                pending, one, concurrency=services.generate.concurrency
            ):
                row: dict[str, Any] = {"id": prompt["id"]}
                if isinstance(answer, RequestRefused):
                    row["refused"] = str(answer)
                else:
                    row["token_ids"] = answer.token_ids
                    row["finish_reason"] = answer.finish_reason
                    num_tokens += len(answer.token_ids)
                journal.append(row)
                rate = num_tokens / (time.monotonic() - start)
                progress.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
                progress.update()


def _finish(
    artifact: Path,
    *,
    recipe: dict[str, Any],
    rows: list[Prompt],
    rendered: dict[str, list[int]],
    responses: dict[str, dict[str, Any]],
    rejected: dict[str, Rejected],
    generate: GenerateParams,
    mask_token_id: int,
) -> None:
    """Applies the policies, writes the artifact and, last, its manifest."""
    table: list[dict[str, Any]] = []
    finish_reasons: Counter[str] = Counter()
    num_truncated = num_looping = num_tokens = 0
    for prompt in rows:
        if prompt["id"] in rejected:
            continue
        response = responses[prompt["id"]]
        if "refused" in response:
            rejected[prompt["id"]] = Rejected("server_refused", response["refused"])
            continue
        finish_reasons[response["finish_reason"]] += 1
        verdict = conversations.judge(
            response["token_ids"],
            finish_reason=response["finish_reason"],
            generate=generate,
            mask_token_id=mask_token_id,
        )
        if isinstance(verdict, Rejected):
            rejected[prompt["id"]] = verdict
            continue
        num_truncated += verdict.truncated
        num_looping += verdict.looping
        num_tokens += len(response["token_ids"])
        table.append(
            conversations.row(
                prompt,
                input_ids=rendered[prompt["id"]],
                response=response["token_ids"][: verdict.num_kept],
                finish_reason=response["finish_reason"],
                looping=verdict.looping,
            )
        )
    counts = contracts.write_rejects(
        artifact,
        contracts.reject_rows(rejected),
    )
    contracts.check_yield(
        "generate", kept=len(table), rejected=counts, limit=generate.max_rejected_fraction
    )
    if not any(row["split"] == contracts.TRAIN for row in table):
        raise ValueError("generate: no training prompt has a response that may be used")
    contracts.write_table(artifact / "conversations.parquet", table, contracts.CONVERSATIONS)
    loss_tokens = sum(sum(row["loss_mask"]) for row in table)
    contracts.write_manifest(
        artifact,
        contracts.Manifest(
            kind="generate",
            recipe=recipe,
            counts={
                "rows": len(table),
                **{
                    split: sum(row["split"] == split for row in table)
                    for split in (contracts.TRAIN, contracts.VALIDATION)
                },
            },
            rejected=counts,
            info={
                "finish_reasons": dict(sorted(finish_reasons.items())),
                "truncated": num_truncated,
                "looping": num_looping,
                "tokens": sum(len(row["input_ids"]) for row in table),
                "loss_tokens": loss_tokens,
                "capped_tokens": num_tokens - loss_tokens,
            },
        ),
    )
    print(
        f"generate: {len(table)} conversations, {loss_tokens} response tokens; {num_truncated} ran "
        f"into max_tokens, {num_looping} loop ({generate.looping}), {sum(counts.values())} rejected"
    )
