"""The full depth against two given servers whose wire is ours: what is published, failures under
load, and what a dead server leaves."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages import contracts, tracking
from stages.evaluate import full
from stages.params import DOMAINS, EngineParams, Params, Services
from stages.serving.chat import Renderer
from tests.evaluate.case import ACCEPTED, LOOP_ACCEPTED, RESPONSE, Case, serving

LOAD_KEYS = {
    "requests",
    "failed",
    "output_tokens",
    "elapsed_s",
    "busy_s",
    "tokens_per_s",
    "tokens_per_s_per_user",
    "first_token_s",
    "inter_token_s",
    "acceptance_length",
    "tokens_per_round",
}


@pytest.fixture
def case(tmp_path: Path, tiny_target: Path, params: Params, tiny_engine: EngineParams) -> Case:
    case = Case(tmp_path, tiny_target, params, tiny_engine)
    case.evaluate = case.evaluate.model_copy(
        update={
            "depth": "full",
            "speed_prompts": 1,
            "load_concurrencies": [1, 3],
            "load_requests": 4,
            "sampled_prompts": 1,
            "context_lengths": [60, 200, 4000],
            "context_prompts": 2,
            "bootstrap_resamples": 100,
        }
    )
    case.drafter.max_model_len = 2000  # the baseline serves 256
    return case


@pytest.fixture
def urls(case: Case, services: Services) -> Iterator[Services]:
    with serving(case.drafter) as drafter, serving(case.baseline) as baseline:
        given = services.evaluate.model_copy(update={"drafter": drafter, "baseline": baseline})
        yield services.model_copy(update={"evaluate": given})


def read(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text())


def test_everything_of_the_full_depth_is_published(case: Case, urls: Services) -> None:
    out = case.run(urls)
    body = read(out, "serving.json")["full"]
    assert list(body["load"]) == ["1", "3"]
    for concurrency, requests in (("1", 4), ("3", 12)):
        for engine in ("drafter", "baseline"):
            side = body["load"][concurrency][engine]
            assert set(side) == LOAD_KEYS
            assert (side["requests"], side["failed"]) == (requests, 0)
            assert side["output_tokens"] == requests * len(RESPONSE)
            assert 0 < side["busy_s"] <= side["elapsed_s"]
        with_drafter, plain = (body["load"][concurrency][e] for e in ("drafter", "baseline"))
        assert 1 < with_drafter["acceptance_length"] == with_drafter["tokens_per_round"]
        assert plain["acceptance_length"] is None
        assert plain["inter_token_s"]["median"] >= case.baseline.chunk_s
    assert len(body["pareto"]["points"]["baseline"]) == 2
    assert set(body["pareto"]) == {"points", "matched", "best_ratio", "at_interactivity"}
    longest = 256 - len(RESPONSE) - 4 - 1
    assert [row["prompt_tokens"] for row in body["context"]] == [60, 200, longest]
    assert [row["prompts"] for row in body["context"]] == [2, 2, 2]
    for row in body["context"]:
        assert row["prompt_tokens"] * 0.8 < row["mean_prompt_tokens"] <= row["prompt_tokens"]
        assert row["speedup"] > 1
        assert row["acceptance_length"] > 1
    assert body["context_source"] == "authored"
    sampled = body["sampled"]
    assert sampled["temperature"] == 1.0
    assert tuple(sampled["domains"]) == DOMAINS
    lengths = {1 + sum(some) / len(some) for some in (ACCEPTED, LOOP_ACCEPTED)}
    assert {domain["acceptance_length"] for domain in sampled["domains"].values()} <= lengths
    sessions = read(out, "serving.json")["sessions"]
    assert [session["temperature"] for session in sessions] == [0.0, 1.0]
    for name, number in (("load.csv", 4), ("context.csv", 3)):
        with (out / name).open() as file:
            assert len(list(csv.DictReader(file))) == number


def test_metrics_of_the_full_depth_are_flat_and_named_alike_in_every_run(
    case: Case, urls: Services
) -> None:
    out = case.run(urls)
    body = read(out, "serving.json")["full"]
    metrics = read(out, "metrics.json")
    flat = metrics["full"]
    for name, engine in (("", "drafter"), ("baseline_", "baseline")):
        for concurrency in ("1", "3"):
            side = body["load"][concurrency][engine]
            assert flat[f"{name}throughput_c{concurrency}"] == side["tokens_per_s"]
            assert flat[f"{name}first_token_s_c{concurrency}"] == side["first_token_s"]["median"]
    assert flat["matched_interactivity_ratio"] == body["pareto"]["best_ratio"]
    assert flat["speedup_context_200"] == body["context"][1]["speedup"]
    logged = dict(tracking.flatten(metrics, separator="/"))
    assert all(f"full/{name}" in logged for name in flat)
    assert logged["macro_tokens_per_round"] == metrics["macro_tokens_per_round"]
    # Where nothing could be measured the names are the same.
    for sides in body["load"].values():
        for side in sides.values():
            side.update(tokens_per_s_per_user=None, first_token_s={"median": None, "p95": None})
    assert set(full.metrics(body)) == set(flat)


def test_texts_of_longbench_are_taken_where_its_file_is_given(case: Case, urls: Services) -> None:
    path = case.folder / "longbench.json"
    item = {"context": "w " * 5000, "question": "Which?", "answer": "A"}
    path.write_text(json.dumps([item | {f"choice_{letter}": letter for letter in "ABCD"}] * 2))
    case.evaluate = case.evaluate.model_copy(update={"longbench": str(path)})
    body = read(case.run(urls), "serving.json")["full"]
    assert body["context_source"] == "LongBench-v2"
    for row in body["context"]:
        assert row["prompts"] == 2
        assert row["mean_prompt_tokens"] > row["prompt_tokens"] - 3
    assert len(case.drafter.requests[-1]) < 256


def test_core_publishes_intervals_and_no_full_depth(case: Case, urls: Services) -> None:
    case.evaluate = case.evaluate.model_copy(update={"depth": "core", "speed_prompts": 2})
    out = case.run(urls)
    body = read(out, "serving.json")
    assert body["full"] is None
    assert "full" not in read(out, "metrics.json")
    assert not (out / "load.csv").exists()
    low, high = body["intervals"]["macro_acceptance_length"]
    assert low <= read(out, "metrics.json")["macro_acceptance_length"] <= high
    assert tuple(body["intervals"]["domains"]) == DOMAINS


def test_requests_that_fail_under_load_are_counted_and_not_averaged(
    case: Case, urls: Services
) -> None:
    """The second prompts of each domain are refused; only the load at 3 asks three of them."""
    renderer = Renderer(case.inputs["target"])
    rows = contracts.read_table(case.inputs["prompts"] / "evaluation-qa.parquet", contracts.PROMPTS)
    parity = len(renderer.render(json.loads(rows[1]["messages"]))) % 2
    case.baseline.refuses = lambda prompt: len(prompt) % 2 == parity and len(prompt) < 50
    case.evaluate = case.evaluate.model_copy(update={"context_lengths": [200]})
    body = read(case.run(urls), "serving.json")["full"]
    assert [body["load"][c]["baseline"]["failed"] for c in ("1", "3")] == [0, 3]
    side = body["load"]["3"]["baseline"]
    assert (side["requests"], side["output_tokens"]) == (12, 9 * len(RESPONSE))
    assert body["load"]["3"]["drafter"]["failed"] == 0
    assert all("refused" in reason for reason in body["failures"]["3"]["baseline"])


def test_a_server_that_dies_under_load_ends_the_stage_and_keeps_what_was_done(
    case: Case, urls: Services
) -> None:
    """The baseline dies after its warm-up, 9 prompts of speed, 6 of context, and 6 of 16 loads."""
    case.baseline.dies_after = 1 + 9 + 1 + 6 + 1 + 4 + 2
    with pytest.raises(ValueError, match=r"baseline server fails under 3 requests(.|\n)*kept"):
        case.run(urls)
    assert not (case.folder / "evaluation").exists()
    case.baseline.dies_after = None
    asked = len(case.baseline.requests)
    out = case.run(urls)
    assert len(case.baseline.requests) - asked == 1 + 12
    assert list(read(out, "serving.json")["full"]["load"]) == ["1", "3"]
