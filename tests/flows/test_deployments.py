"""prefect.yaml and the flow's parameters, through Prefect's own models."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.exceptions import ParameterTypeError

from flows import profiles
from flows.retrain import retrain

ROOT = Path(__file__).resolve().parents[2]
BODY = yaml.safe_load((ROOT / "prefect.yaml").read_text())


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_prefect_reads_both_deployments() -> None:
    model = PrefectYamlModel.model_validate(BODY)
    assert {deployment.name for deployment in model.deployments} == {"on-demand", "nightly"}


@pytest.mark.parametrize("deployment", BODY["deployments"], ids=lambda it: it["name"])
def test_a_deployment_runs_the_flow_once_at_a_time_and_the_others_wait(deployment: dict) -> None:
    assert deployment["entrypoint"] == "flows/retrain.py:retrain"
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert deployment["work_pool"] == {"name": "local"}
    assert deployment["parameters"]["profile"] in profiles.names()


def test_nightly_has_a_time_zone() -> None:
    (nightly,) = [it for it in BODY["deployments"] if it["name"] == "nightly"]
    (schedule,) = nightly["schedules"]
    assert set(schedule) >= {"cron", "timezone"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"profile": "quik"}, "quick"),
        ({"profile": 3}, "string"),
        ({"profile": "quick", "overrides": {"num_layers": 2}}, "pattern"),
        ({"profile": "quick", "overrides": {"drafter.num_layers": {"deep": 1}}}, "overrides"),
    ],
)
def test_wrong_parameters_are_refused_by_name(parameters: dict, message: str) -> None:
    with pytest.raises(ParameterTypeError, match=message):
        retrain.validate_parameters(parameters)


def test_right_parameters_are_taken_as_they_are() -> None:
    overrides = {"drafter.num_layers": 2, "extract.layer_ids": [1, 2], "target.source": "folder"}
    parameters = {"profile": "quick", "overrides": overrides}
    assert retrain.validate_parameters(parameters) == parameters


def test_the_schema_shown_to_a_caller_names_both_parameters() -> None:
    assert set(retrain.parameters.properties) == {"profile", "overrides"}
    assert retrain.parameters.required == ["profile"]
