"""The evaluate stage against two given servers whose wire is ours: what is published, what is asked
again after a crash, and what makes it fail. The losslessness part is preset in the working folder,
as a run that got so far leaves it; tests/serving/test_proposer.py runs it for real."""

from __future__ import annotations

import asyncio
import csv
import json
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save_file

from stages import contracts
from stages.evaluate import report, stage
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
    """A vLLM server's surface with canned answers; it is dead after `dies_after` requests."""

    def __init__(self, *, speculates: bool, chunk_s: float) -> None:
        self.speculates, self.chunk_s = speculates, chunk_s
        self.requests: list[list[int]] = []
        self.dies_after: int | None = None
        self.accepted: list[int] = []

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

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
            self._preset_lossless()
            stage.run(
                engine=self.engine,
                generate=self.params.generate,
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

    def _preset_lossless(self) -> None:
        kinds = {"target": "target", "prompts": "prepare", "package": "package"}
        recipe = contracts.recipe(
            {
                "engine": self.engine,
                "generate": self.params.generate,
                "evaluate": self.evaluate,
            },
            {
                name: contracts.read_manifest(self.inputs[name], kind)
                for name, kind in kinds.items()
            },
        )
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


@pytest.fixture
def case(tmp_path: Path, tiny_target: Path, params: Params, tiny_engine: EngineParams) -> Case:
    return Case(tmp_path, tiny_target, params, tiny_engine)


@pytest.fixture
def urls(case: Case, services: Services) -> Iterator[Services]:
    with serving(case.drafter) as drafter, serving(case.baseline) as baseline:
        given = services.evaluate.model_copy(update={"drafter": drafter, "baseline": baseline})
        yield services.model_copy(update={"evaluate": given})


def test_metrics_have_the_keys_that_stay_for_ever(case: Case, urls: Services) -> None:
    out = case.run(urls)
    manifest = contracts.read_manifest(out, "evaluate")
    assert manifest.counts == {"prompts": 18, "speed_pairs": 18, "checked": 1, "identical": 1}
    assert manifest.rejected == {"too_long": 9}
    metrics = json.loads((out / "metrics.json").read_text())
    assert list(metrics) == [
        "macro_acceptance_length",
        "macro_acceptance_length_without_looping",
        "macro_speedup",
        "domains",
        "lossless",
    ]
    assert tuple(metrics["domains"]) == DOMAINS
    everything = [*ACCEPTED, *LOOP_ACCEPTED]
    length = 1 + sum(everything) / len(everything)
    plain = 1 + sum(ACCEPTED) / len(ACCEPTED)
    assert metrics["macro_acceptance_length_without_looping"] == pytest.approx(plain)
    assert metrics["macro_acceptance_length"] == pytest.approx(length)
    assert metrics["macro_speedup"] > 1
    assert metrics["lossless"] == {"checked": 1, "identical": 1}
    for domain in metrics["domains"].values():
        assert set(domain) == {
            "acceptance_length",
            "acceptance_length_without_looping",
            "looping",
            "out_of_vocabulary",
            "tokens_per_s_per_user",
            "baseline_tokens_per_s_per_user",
            "prompts",
            "drafts",
        }
        assert (domain["prompts"], domain["drafts"]) == (2, len(everything))
        assert domain["acceptance_length_without_looping"] == pytest.approx(plain)
        assert domain["looping"] == 1
        unknown = RESPONSE.count(UNKNOWN) + LOOP.count(UNKNOWN)
        assert domain["out_of_vocabulary"] == pytest.approx(unknown / (2 * len(RESPONSE)))
    with (out / "by_position.csv").open() as file:
        rows = list(csv.DictReader(file))
    macro = [float(row["survival"]) for row in rows if row["domain"] == "macro"]
    assert 1 + sum(macro) == pytest.approx(length)
    assert len(rows) == 10 * BLOCK
    serving_file = json.loads((out / "serving.json").read_text())
    assert serving_file["warnings"] == []
    (session,) = serving_file["sessions"]
    kinds = [
        [row for row in serving_file["acceptance"] if row["looping"] is looping]
        for looping in (False, True)
    ]
    assert [len(rows) for rows in kinds] == [9, 9]
    counted = sum(sum(row["accepted"]) for rows in kinds for row in rows)
    assert counted == session["counters"]["vllm:spec_decode_num_accepted_tokens"]
    assert not any("token_ids" in row for row in serving_file["acceptance"])
    orders = [tuple(row["order"]) for row in serving_file["speed"]]
    assert orders.count(("baseline", "drafter")) == 9
    assert (out / "plots" / "acceptance_by_domain.png").stat().st_size > 1000


def test_the_report_is_of_what_was_published(case: Case, urls: Services) -> None:
    body = {"method": "none", "samples": 1, "blocks": 2, "slots": []}
    contracts.write_json(case.inputs["package"] / "calibration.json", body)
    earlier = case.run(urls).rename(case.folder / "earlier")
    case.evaluate = case.evaluate.model_copy(update={"compare_with": "earlier"})
    out = case.run(urls)
    page = (out / "report.html").read_text()
    assert "Against earlier" in page
    assert "The package holds no calibration.json." not in (earlier / "report.html").read_text()
    with chdir(case.folder):
        again = case.folder / "again.html"
        report.write(
            again,
            evaluation=Path("evaluation"),
            package=case.inputs["package"],
            compare_with=Path("earlier"),
        )
    assert again.read_text() == page


def test_an_earlier_evaluation_that_is_none_is_refused_before_anything_is_asked(
    case: Case, urls: Services
) -> None:
    case.evaluate = case.evaluate.model_copy(update={"compare_with": "nowhere"})
    with pytest.raises(ValueError, match=r"nowhere/metrics\.json: no such file"):
        case.run(urls)
    assert not case.drafter.requests


def test_only_what_is_missing_is_asked_again(case: Case, urls: Services) -> None:
    """A baseline that dies after its warm-up and 4 prompts: acceptance and 4 pairs are kept."""
    case.baseline.dies_after = 5
    with pytest.raises(ValueError, match=r"3 of 36 requests failed 2 times(.|\n)*engine dead"):
        case.run(urls)
    assert not (case.folder / "evaluation").exists()
    case.baseline.dies_after = None
    asked = len(case.drafter.requests)
    out = case.run(urls)
    assert len(case.drafter.requests) - asked == 1 + (18 - 4)
    assert contracts.read_manifest(out, "evaluate").counts["speed_pairs"] == 18


def test_a_domain_of_short_responses_is_null_and_said_so(case: Case, urls: Services) -> None:
    case.evaluate = case.evaluate.model_copy(update={"min_speed_tokens": len(RESPONSE) + 1})
    out = case.run(urls)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["macro_speedup"] is None
    assert all(d["tokens_per_s_per_user"] is None for d in metrics["domains"].values())
    assert len(json.loads((out / "serving.json").read_text())["notes"]) == 9


def test_a_server_without_acceptance_metrics_is_refused(case: Case, urls: Services) -> None:
    case.drafter.speculates = False
    with pytest.raises(ValueError, match="per-request-spec-decode-metrics detailed"):
        case.run(urls)


def test_no_room_for_a_prompt_is_an_error_before_anything_is_asked(
    case: Case, urls: Services
) -> None:
    case.engine = case.engine.model_copy(update={"max_model_len": len(RESPONSE) + BLOCK})
    with pytest.raises(ValueError, match=r"max_model_len=\d+ leaves no room"):
        case.run(urls)
    assert not case.drafter.requests
