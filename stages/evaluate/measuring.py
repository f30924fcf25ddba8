"""The measurements of one evaluation, on one pair of servers at a time.

Every row goes to a journal in the stage's working folder as soon as it is known, so a stage that
was killed measures only what is missing.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stages.evaluate import load, measure
from stages.evaluate.full import Asked
from stages.evaluate.prompts import Prompt
from stages.journal import Journal
from stages.params import EngineParams, EvaluateParams, ServeParams, Services
from stages.services import MANAGED
from stages.serving.launch import Endpoint, given_endpoint, vllm_server
from stages.serving.plans import on_cpu
from stages.serving.serve import drafter_arguments

JOURNALS = ("acceptance", "sampled", "sessions", "speed", "load", "context")


class Measuring:
    """The measurements, each resumed from the working folder."""

    def __init__(
        self,
        work: Path,
        *,
        engine: EngineParams,
        serve: ServeParams,
        evaluate: EvaluateParams,
        services: Services,
        inputs: Mapping[str, Path],
        warm_up: Sequence[int],
    ) -> None:
        self._work, self._inputs = work, inputs
        self._engine, self._evaluate, self._services = engine, evaluate, services
        self._serve = serve
        # Acceptance is of whole blocks, so that it compares between runs and with the trainer's;
        # speed is of the rule that serves. Our worker takes both from one server.
        self._switches = services.evaluate.drafter == MANAGED and on_cpu()
        self._setting = measure.Setting(
            max_tokens=evaluate.max_tokens,
            timeout_s=services.vllm.request_timeout_s,
            warm_up=warm_up,
        )

    def longer(self, max_model_len: int) -> Measuring:
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
            self._switch(drafter, "fixed")
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
            self._switch(drafter, self._serve.scheduler)
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

    def _switch(self, drafter: Endpoint, scheduler: str) -> None:
        if self._switches:
            asyncio.run(measure.switch_scheduler(drafter, scheduler, setting=self._setting))

    def _drafter_server(self) -> Any:
        arguments = drafter_arguments(self._inputs["package"], serve=self._serve)
        environment = {"VLLM_SERVER_DEV_MODE": "1"} if self._switches else {}
        return self._server("drafter", self._services.evaluate.drafter, arguments, environment)

    def _baseline_server(self) -> Any:
        return self._server("baseline", self._services.evaluate.baseline, [], {})

    @contextmanager
    def _server(
        self, role: str, url: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> Iterator[Endpoint]:
        if url != MANAGED:
            yield given_endpoint(url)
            return
        # A prompt is sent more than once; a cached prefix would make the second one look faster.
        shared = ["--no-enable-prefix-caching", "--seed", str(self._evaluate.seed % 2**32)]
        with vllm_server(
            role=role,
            model=self._inputs["target"],
            engine=self._engine,
            services=self._services,
            arguments=[*shared, *arguments],
            environment=environment,
        ) as endpoint:
            yield endpoint


def _missing(prompts: list[Prompt], journal: Journal) -> list[Prompt]:
    known = {row["id"] for row in journal.rows}
    return [prompt for prompt in prompts if prompt.id not in known]
