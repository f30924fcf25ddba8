"""Proves the package in the real engine: data/target, data/prompts and package -> evaluation.

Cost on two cores at the default settings: about six minutes, most of it the speed of one user; the
full depth (full.py) adds about ten. Losslessness and every response are kept in the working folder
as they finish; a stage that was killed, or that failed later, measures only what is missing.
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stages import contracts, summary
from stages.evaluate import full, intervals, load, lossless, measure, results, tables
from stages.evaluate.full import Asked
from stages.evaluate.prompts import Prompt, read_prompts, room, spread
from stages.evaluate.responses import judged, read_draft_vocabulary
from stages.journal import Journal
from stages.params import EngineParams, EvaluateParams, GenerateParams, Services
from stages.services import MANAGED
from stages.serving import process
from stages.serving.chat import Renderer
from stages.serving.launch import Endpoint, vllm_server
from stages.serving.plans import on_cpu
from stages.serving.speculative import read_drafter_config, speculative_arguments

WARM_UP = "Count from one to thirty in words, one number a line."  # no evaluation prompt
JOURNALS = ("acceptance", "sampled", "sessions", "speed", "load", "context")


def run(
    *,
    engine: EngineParams,
    generate: GenerateParams,
    evaluate: EvaluateParams,
    services: Services,
    inputs: Mapping[str, Path],
    out: Path,
) -> None:
    """Measures and publishes metrics.json, tables and plots, and prints the results table.

    Raises ValueError when requests fail, counts contradict each other, or the drafter changes the
    target's output; nothing is published then.
    """
    manifests = {
        name: contracts.read_manifest(inputs[name], kind)
        for name, kind in (("target", "target"), ("prompts", "prepare"), ("package", "package"))
    }
    # generate's chat template arguments render these prompts too: the drafter learned that form.
    recipe = contracts.recipe(
        {"engine": engine, "generate": generate, "evaluate": evaluate}, manifests
    )
    deep = evaluate.depth == full.FULL
    if deep and evaluate.longbench is not None:
        recipe["inputs"]["longbench"] = contracts.file_sha256(Path(evaluate.longbench))
    work = contracts.working_folder("evaluate", recipe)
    block_size = read_drafter_config(inputs["package"]).block_size
    prompts, rejects = read_prompts(
        inputs["prompts"],
        target=inputs["target"],
        evaluate=evaluate,
        chat_template_kwargs=generate.chat_template_kwargs,
        longest=room(
            max_model_len=engine.max_model_len,
            max_tokens=evaluate.max_tokens,
            block_size=block_size,
        ),
    )
    renderer = Renderer(inputs["target"])
    renderer.tokenizer.model_max_length = sys.maxsize  # long texts are rendered to be cut, silently

    def render(text: str) -> list[int]:
        return renderer.render(
            [{"role": "user", "content": text}], chat_template_kwargs=generate.chat_template_kwargs
        )

    measuring = _Measuring(
        work,
        engine=engine,
        evaluate=evaluate,
        services=services,
        inputs=inputs,
        block_size=block_size,
        warm_up=render(WARM_UP),
    )
    long = None
    if deep:
        long = full.plan_context(
            inputs,
            engine=engine,
            evaluate=evaluate,
            services=services,
            block_size=block_size,
            render=render,
        )
    verdict = lossless.check(
        work / "lossless.json",
        spread(prompts, count=evaluate.lossless_prompts),
        target=inputs["target"],
        package=inputs["package"],
        engine=engine,
        services=services,
        max_tokens=evaluate.lossless_tokens,
        num_speculative_tokens=block_size,
    )
    for max_model_len, asked in full.parts(prompts, long=long, engine=engine, evaluate=evaluate):
        measuring.longer(max_model_len).served(asked)
    rows = measuring.rows([*prompts, *(long.prompts if long else ())])
    known = read_draft_vocabulary(inputs["package"])
    acceptance = [judged(row, generate=generate, known=known) for row in rows["acceptance"]]
    speed, sessions = rows["speed"], rows["sessions"]
    warnings = [
        warning
        for session in sessions
        for warning in measure.check_session(
            session, block_size=block_size, shared=services.evaluate.drafter != MANAGED
        )
    ]
    found = results.aggregate(
        acceptance, speed, block_size=block_size, min_speed_tokens=evaluate.min_speed_tokens
    )
    body = results.metrics(found, lossless=verdict)
    notes = results.notes(found, min_speed_tokens=evaluate.min_speed_tokens)
    full_body = None
    if long is not None:
        full_body = full.body(rows, long=long, evaluate=evaluate)
        body["full"] = full.metrics(full_body)
        notes += long.notes
    artifact = work / "artifact"
    shutil.rmtree(artifact, ignore_errors=True)
    (artifact / "plots").mkdir(parents=True)
    contracts.write_json(artifact / "metrics.json", body)
    contracts.write_json(
        artifact / "serving.json",
        {
            "settings": {**recipe["params"], "block_size": block_size},
            "environment": tables.environment(services),
            "notes": notes,
            "warnings": warnings,
            "sessions": sessions,
            "domains": tables.details(found),
            "intervals": intervals.bootstrap(
                acceptance,
                speed,
                min_speed_tokens=evaluate.min_speed_tokens,
                resamples=evaluate.bootstrap_resamples,
                seed=evaluate.seed,
            ),
            "full": full_body,
            "acceptance": acceptance,
            "speed": speed,
            "lossless": json.loads((work / "lossless.json").read_text()),
        },
    )
    tables.write(artifact, found, block_size=block_size, deep=full_body)
    contracts.write_manifest(
        artifact,
        contracts.Manifest(
            kind="evaluate",
            recipe=recipe,
            counts={"prompts": len(acceptance), "speed_pairs": len(speed), **verdict},
            rejected=contracts.write_rejects(artifact, rejects),
            info={"package": manifests["package"].info["name"]},
        ),
    )
    contracts.publish(artifact, out)
    shutil.rmtree(work)
    print(summary.format_summary(body))
    for warning in warnings:
        print(f"warning: {warning}")


class _Measuring:
    """The measurements, each resumed from the working folder."""

    def __init__(
        self,
        work: Path,
        *,
        engine: EngineParams,
        evaluate: EvaluateParams,
        services: Services,
        inputs: Mapping[str, Path],
        block_size: int,
        warm_up: Sequence[int],
    ) -> None:
        self._work, self._inputs = work, inputs
        self._engine, self._evaluate, self._services = engine, evaluate, services
        self._block_size = block_size
        self._setting = measure.Setting(
            max_tokens=evaluate.max_tokens,
            timeout_s=services.vllm.request_timeout_s,
            warm_up=warm_up,
        )

    def longer(self, max_model_len: int) -> _Measuring:
        """The same with servers that take sequences of that length."""
        other = copy.copy(self)
        other._engine = self._engine.model_copy(update={"max_model_len": max_model_len})
        return other

    def served(self, asked: Asked) -> None:
        """Measures on one pair of servers what the journals do not hold yet."""
        with ExitStack() as stack:
            journals = {
                name: stack.enter_context(Journal(self._work / f"{name}.jsonl"))
                for name in JOURNALS
            }
            waiting = {
                name: _missing(prompts, journals[name]) for name, prompts in asked.prompts.items()
            }
            loads = {row["concurrency"] for row in journals["load"].rows}
            unloaded = [number for number in asked.concurrencies if number not in loads]
            if not (any(waiting.values()) or unloaded):
                return
            drafter = stack.enter_context(self._drafter_server())
            for name, temperature in (
                ("acceptance", 0.0),
                ("sampled", self._evaluate.sampled_temperature),
            ):
                if waiting[name]:
                    asyncio.run(
                        measure.measure_acceptance(
                            waiting[name],
                            endpoint=drafter,
                            setting=self._setting,
                            temperature=temperature,
                            concurrency=self._evaluate.acceptance_concurrency,
                            journal=journals[name],
                            sessions=journals["sessions"],
                        )
                    )
            if not (waiting["speed"] or waiting["context"] or unloaded):
                return
            baseline = stack.enter_context(self._baseline_server())
            for name in ("speed", "context"):
                if waiting[name]:
                    asyncio.run(
                        measure.measure_speed(
                            waiting[name],
                            drafter=drafter,
                            baseline=baseline,
                            setting=self._setting,
                            journal=journals[name],
                        )
                    )
            if unloaded:
                asyncio.run(
                    load.measure_load(
                        asked.prompts["acceptance"],
                        drafter=drafter,
                        baseline=baseline,
                        setting=self._setting,
                        min_speed_tokens=self._evaluate.min_speed_tokens,
                        concurrencies=asked.concurrencies,
                        requests=self._evaluate.load_requests,
                        journal=journals["load"],
                    )
                )

    def rows(self, prompts: Sequence[Prompt]) -> dict[str, list[dict[str, Any]]]:
        """Every journal's rows by its name, in the prompts' order."""
        order = {prompt.id: index for index, prompt in enumerate(prompts)}
        found = {}
        for name in JOURNALS:
            with Journal(self._work / f"{name}.jsonl") as journal:
                found[name] = sorted(journal.rows, key=lambda row: order.get(row.get("id", ""), 0))
        return found

    def _drafter_server(self) -> Any:
        arguments = [
            *speculative_arguments(
                self._inputs["package"].resolve(),
                num_speculative_tokens=self._block_size,
                device="cpu" if on_cpu() else "cuda",
            ),
            *("--per-request-spec-decode-metrics", "detailed"),
        ]
        return self._server("drafter", self._services.evaluate.drafter, arguments)

    def _baseline_server(self) -> Any:
        return self._server("baseline", self._services.evaluate.baseline, [])

    @contextmanager
    def _server(self, role: str, url: str, arguments: list[str]) -> Iterator[Endpoint]:
        if url != MANAGED:
            answer = process.get_json(f"{url.rstrip('/')}/v1/models", timeout_s=30.0)
            yield Endpoint(url.rstrip("/"), answer["data"][0]["id"], log=None, master=None)
            return
        # A prompt is sent more than once; a cached prefix would make the second one look faster.
        shared = ["--no-enable-prefix-caching", "--seed", str(self._evaluate.seed % 2**32)]
        with vllm_server(
            role=role,
            model=self._inputs["target"],
            engine=self._engine,
            services=self._services,
            arguments=[*shared, *arguments],
        ) as endpoint:
            yield endpoint


def _missing(prompts: list[Prompt], journal: Journal) -> list[Prompt]:
    known = {row["id"] for row in journal.rows}
    return [prompt for prompt in prompts if prompt.id not in known]
