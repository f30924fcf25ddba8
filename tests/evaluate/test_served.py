"""The evaluate stage against real vLLM servers (tiny target, random drafter): the full depth, and a
server that is killed half-way."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages import contracts
from stages.evaluate import measure
from stages.params import DOMAINS, EngineParams, Params, Services
from stages.serving import plans
from stages.serving.serve import drafter_arguments
from tests.conftest import TINY_LAYER_IDS
from tests.evaluate.case import BLOCK, RESPONSE, Case, serving
from tests.random_drafter import config_for, random_tensors, write_package
from tests.states.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MAX_TOKENS = 40


@pytest.fixture
def case(tmp_path: Path, tiny_target: Path, params: Params, tiny_engine: EngineParams) -> Case:
    case = Case(tmp_path, tiny_target, params, tiny_engine)
    config = config_for(tiny_target, layer_ids=TINY_LAYER_IDS, block_size=BLOCK)
    package = write_package(case.inputs["package"], config, random_tensors(config, tiny_target))
    contracts.write_manifest(
        package, contracts.Manifest(kind="package", recipe={}, info={"name": "random"})
    )
    case.evaluate = case.evaluate.model_copy(
        update={
            "max_tokens": MAX_TOKENS,
            "min_speed_tokens": len(RESPONSE),
            "speed_prompts": 1,
            "load_concurrencies": [1, 4],
            "load_requests": 9,
            "sampled_prompts": 1,
            "context_lengths": [100, 8192],  # the tiny target takes 1,024
            "context_prompts": 1,
        }
    )
    return case


def read(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text())


def test_the_full_depth_with_a_managed_drafter_and_a_given_baseline(
    case: Case, small_services: Services
) -> None:
    """Two starts: a drafter server of 256 tokens, and one of 1,024 for the long context."""
    case.evaluate = case.evaluate.model_copy(update={"depth": "full"})
    case.baseline.max_model_len = 4096
    with serving(case.baseline) as baseline:
        given = small_services.evaluate.model_copy(update={"baseline": baseline})
        out = case.run(small_services.model_copy(update={"evaluate": given}))
    metrics, body = read(out, "metrics.json"), read(out, "serving.json")
    assert body["warnings"] == []
    for domain in metrics["domains"].values():
        assert domain["drafts"] > 0
        assert domain["tokens_per_round"] == pytest.approx(domain["acceptance_length"])
        assert domain["tokens_per_s_per_user"] > 0
        assert domain["first_token_s"] > 0
    deep = body["full"]
    for sides in deep["load"].values():
        for engine in ("drafter", "baseline"):
            assert sides[engine]["failed"] == 0
            assert sides[engine]["tokens_per_s"] > 0
            assert (
                0
                < sides[engine]["inter_token_s"]["median"]
                <= sides[engine]["inter_token_s"]["p95"]
            )
        assert sides["drafter"]["acceptance_length"] >= 1
        assert sides["baseline"]["acceptance_length"] is None
    slow, fast = (deep["load"][c]["drafter"]["tokens_per_s"] for c in ("1", "4"))
    assert fast > slow
    assert deep["pareto"]["points"]["drafter"][0]["concurrency"] == 1
    assert [row["prompt_tokens"] for row in deep["context"]] == [100, 1024 - MAX_TOKENS - BLOCK - 1]
    for row in deep["context"]:
        assert row["acceptance_length"] >= 1
        assert row["speedup"] > 0
    assert deep["context"][1]["mean_prompt_tokens"] > 256
    assert deep["sampled"]["macro_acceptance_length"] >= 1
    assert {domain["prompts"] for domain in deep["sampled"]["domains"].values()} == {1}
    with (out / "load.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["concurrency"], row["engine"]) for row in rows] == [
        *(("1", "drafter"), ("1", "baseline"), ("4", "drafter"), ("4", "baseline"))
    ]
    assert contracts.read_manifest(out, "evaluate").counts["prompts"] == 2 * len(DOMAINS)


def drafter_plan(case: Case, services: Services) -> plans.process.Plan:
    return plans.vllm_plan(
        case.inputs["target"],
        engine=case.engine,
        services=services,
        arguments=[
            *drafter_arguments(case.inputs["package"], serve=case.params.serve),
            "--no-enable-prefix-caching",
        ],
        environment={},
    )


@contextlib.contextmanager
def killed_after(server: Server, journal: Path, *, rows: int) -> Iterator[None]:
    """SIGKILL of the server once the journal has that many rows."""

    def watch() -> None:
        while not journal.is_file() or len(journal.read_text().splitlines()) < rows:
            time.sleep(0.002)
        server.signal(signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    thread.join(timeout=60)


def test_a_server_killed_half_way_ends_the_stage_and_the_next_run_asks_the_rest(
    case: Case, small_services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(case.folder)
    case.evaluate = case.evaluate.model_copy(update={"acceptance_concurrency": 1})
    with (
        Server(drafter_plan(case, small_services), case.folder / "server.log") as server,
        serving(case.baseline) as baseline,
    ):
        given = small_services.evaluate.model_copy(
            update={"drafter": f"http://{server.address}", "baseline": baseline}
        )
        services = small_services.model_copy(update={"evaluate": given})
        case.preset_lossless()
        (work,) = (case.folder / "run").glob("evaluate-*")
        journal = work / "acceptance.jsonl"
        with (
            killed_after(server, journal, rows=9),
            pytest.raises(ValueError, match=r"3 of 18 requests failed 2 times(.|\n)*are kept"),
        ):
            case.run(services)
        assert not (case.folder / "evaluation").exists()
        kept = [json.loads(line) for line in journal.read_text().splitlines()]
        assert 9 <= len(kept) < 18 - measure.MAX_FAILURES
        whole = [name for name in DOMAINS if sum(row["domain"] == name for row in kept) == 2]
        assert len(whole) >= 4

        server.launch()
        server.wait()
        out = case.run(services)
    body = read(out, "serving.json")
    (session,) = body["sessions"]  # the killed one ended without its counters
    assert session["prompts"] == 18 - len(kept)
    again = {row["id"]: row for row in body["acceptance"]}
    assert len(again) == 18
    for row in kept:
        assert again[row["id"]]["drafted"] == row["drafted"]
        assert again[row["id"]]["elapsed_s"] == row["elapsed_s"]
