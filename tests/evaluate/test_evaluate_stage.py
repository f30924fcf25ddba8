"""The evaluate stage against two given servers whose wire is ours: what is published, what is asked
again after a crash, and what makes it fail. The losslessness part is preset in the working folder,
as a run that got so far leaves it; tests/serving/test_proposer.py runs it for real."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from stages import contracts
from stages.evaluate import report
from stages.params import DOMAINS, EngineParams, Params, Services
from tests.evaluate.case import (
    ACCEPTED,
    BLOCK,
    LOOP,
    LOOP_ACCEPTED,
    RESPONSE,
    UNKNOWN,
    Case,
    serving,
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
        "macro_tokens_per_round",
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
            "speedup",
            "prompts",
            "drafts",
            "tokens_per_round",
            "first_token_s",
            "baseline_first_token_s",
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
