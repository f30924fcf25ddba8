"""What the tests of the evaluate stage share: its inputs in small, and a wire of our own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.numpy import save_file

from stages import contracts
from stages.evaluate import stage
from stages.params import DOMAINS, EngineParams, EvaluateParams, Params, Services
from tests.conftest import TINY_LAYER_IDS
from tests.random_drafter import config_for

BLOCK = 4
ACCEPTED = [2, 0, 4, 1]
RESPONSE = list(range(100, 100 + 1 + sum(ACCEPTED) + len(ACCEPTED)))
LOOP_ACCEPTED = [4, 4, 0]
LOOP = [100, 101] * (len(RESPONSE) // 2)  # as long; every second prompt is answered so
UNKNOWN = 100  # a token outside the draft vocabulary


def loops(prompt: list[int]) -> bool:
    """One of each domain's two prompts, which differ by a token."""
    return len(prompt) % 2 == 1


class Wire:
    """A vLLM server's surface with canned answers; it is dead after `dies_after` requests, and
    refuses the streams that `refuses` says."""

    def __init__(self, *, speculates: bool, chunk_s: float) -> None:
        self.speculates, self.chunk_s = speculates, chunk_s
        self.max_model_len = 256
        self.requests: list[list[int]] = []
        self.dies_after: int | None = None
        self.refuses: Callable[[list[int]], bool] = lambda prompt: False
        self.accepted: list[int] = []

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": self.max_model_len}]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        drafts = len(self.accepted)
        return web.Response(
            text=f"vllm:spec_decode_num_drafts_total 7{drafts:06d}.0\n"
            f"vllm:spec_decode_num_draft_tokens_total {drafts * BLOCK}.0\n"
            f"vllm:spec_decode_num_accepted_tokens_total {sum(self.accepted)}.0\n"
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body["prompt"])
        if self.dies_after is not None and len(self.requests) > self.dies_after:
            return web.Response(status=500, text="engine dead")
        if body["stream"] and self.refuses(body["prompt"]):
            return web.Response(status=400, text="refused")
        metrics: dict[str, Any] = {}
        if self.speculates:
            accepted = LOOP_ACCEPTED if loops(body["prompt"]) else ACCEPTED
            self.accepted += accepted
            per_step = {
                "per_step_drafted": [BLOCK] * len(accepted),
                "per_step_accepted": accepted,
            }
            metrics = {"metrics": {"speculative_decoding": per_step}}
        if not body["stream"]:
            tokens = LOOP if loops(body["prompt"]) else RESPONSE
            choice = {"token_ids": tokens, "finish_reason": "length"}
            return web.json_response({"choices": [choice], **metrics})
        answer = web.StreamResponse()
        await answer.prepare(request)
        for token in RESPONSE:
            last = token == RESPONSE[-1]
            choice = {"token_ids": [token], "finish_reason": "length" if last else None}
            await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await asyncio.sleep(self.chunk_s)
        await answer.write(f"data: {json.dumps({'choices': [], **metrics})}\n\n".encode())
        return answer


@contextmanager
def serving(wire: Wire) -> Iterator[str]:
    """The wire on a real socket, in a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    application = web.Application()
    application.router.add_get("/v1/models", wire.models)
    application.router.add_get("/metrics", wire.metrics)
    application.router.add_get("/health", wire.health)
    application.router.add_post("/v1/completions", wire.completions)
    runner = web.AppRunner(application)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    url = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Case:
    """Inputs of the stage and the two servers."""

    def __init__(self, folder: Path, target: Path, params: Params, engine: EngineParams) -> None:
        short_loops = {"loop_ngram": 2, "loop_repeats": 3}
        generate = params.generate.model_copy(update=short_loops)
        self.params = params.model_copy(update={"generate": generate})
        self.folder, self.engine = folder, engine
        self.evaluate: EvaluateParams = params.evaluate.model_copy(
            update={
                "prompts_per_domain": 3,
                "speed_prompts": 2,
                "max_tokens": len(RESPONSE),
                "min_speed_tokens": len(RESPONSE),
            }
        )
        self.inputs = {
            "target": target,
            "prompts": folder / "prompts",
            "package": folder / "package",
        }
        self.drafter = Wire(speculates=True, chunk_s=0.0)
        self.baseline = Wire(speculates=False, chunk_s=0.004)
        self._write_prompts()
        self._write_package()

    def run(self, services: Services) -> Path:
        out = self.folder / "evaluation"
        with chdir(self.folder):
            self.preset_lossless()
            stage.run(
                engine=self.engine,
                generate=self.params.generate,
                serve=self.params.serve,
                evaluate=self.evaluate,
                services=services,
                inputs=self.inputs,
                out=out,
            )
        return out

    def _write_prompts(self) -> None:
        folder = self.inputs["prompts"]
        folder.mkdir()
        for i, domain in enumerate(DOMAINS):
            texts = [f"{'word ' * (2 + i * 4 + n)}?" for n in range(2)] + ["long " * 400]
            rows = [
                {
                    "id": f"{domain}-{n}",
                    "domain": domain,
                    "split": contracts.EVALUATION,
                    "messages": json.dumps([{"role": "user", "content": text}]),
                    "tools": "",
                    "source": "test",
                }
                for n, text in enumerate(texts)
            ]
            contracts.write_table(folder / f"evaluation-{domain}.parquet", rows, contracts.PROMPTS)
        contracts.write_manifest(folder, contracts.Manifest(kind="prepare", recipe={}))

    def _write_package(self) -> None:
        folder = self.inputs["package"]
        folder.mkdir()
        config = config_for(self.inputs["target"], layer_ids=TINY_LAYER_IDS, block_size=BLOCK)
        contracts.write_json(folder / "config.json", config.to_json())
        known = np.arange(config.vocab_size) != UNKNOWN
        save_file({"t2d": known}, folder / "model.safetensors")
        contracts.write_manifest(
            folder, contracts.Manifest(kind="package", recipe={}, info={"name": "p"})
        )

    def preset_lossless(self) -> None:
        kinds = {"target": "target", "prompts": "prepare", "package": "package"}
        recipe = contracts.recipe(
            {
                "engine": self.engine,
                "generate": self.params.generate,
                "serve": self.params.serve,
                "evaluate": self.evaluate,
            },
            {
                name: contracts.read_manifest(self.inputs[name], kind)
                for name, kind in kinds.items()
            },
        )
        if self.evaluate.longbench is not None:
            recipe["inputs"]["longbench"] = contracts.file_sha256(Path(self.evaluate.longbench))
        work = contracts.working_folder("evaluate", recipe)
        same = [[1, 2, 3]]
        contracts.write_json(
            work / "lossless.json",
            {
                "ids": ["qa-0"],
                "plain": same,
                "batch_1": same,
                "batch_all": same,
                "num_drafts": 2,
                "num_accepted_tokens": 1,
            },
        )
