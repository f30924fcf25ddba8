"""The flags that make vLLM serve a package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.params import Params
from stages.serving.speculative import WORKER_CLASS, read_temperatures, speculative_arguments
from tests.conftest import TINY_LAYER_IDS
from tests.random_drafter import config_for


@pytest.fixture
def package(tiny_target: Path, tmp_path: Path) -> Path:
    config = config_for(tiny_target, layer_ids=TINY_LAYER_IDS)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    return tmp_path


def test_cpu_gets_our_worker_and_policy_and_cuda_the_engines_own_method(
    package: Path, params: Params
) -> None:
    on_cpu = pairs(speculative_arguments(package, serve=params.serve, device="cpu"))
    assert on_cpu["--worker-cls"] == WORKER_CLASS
    assert json.loads(on_cpu["--speculative-config"])["method"] == "dflash"
    policy = json.loads(on_cpu["--additional-config"])["dspark"]
    assert policy == {"scheduler": "prefix", "threshold": params.serve.threshold}
    fewer = params.serve.model_copy(update={"num_draft_tokens": 3, "draft_sampling": "greedy"})
    on_cuda = pairs(speculative_arguments(package, serve=fewer, device="cuda"))
    assert on_cuda.keys() == {"--speculative-config"}
    assert json.loads(on_cuda["--speculative-config"]) == {
        "method": "dspark",
        "model": str(package),
        "num_speculative_tokens": 3,
        "draft_sample_method": "greedy",
        "enable_adaptive_verification": True,
    }


def pairs(arguments: list[str]) -> dict[str, str]:
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_a_rule_that_vllms_own_method_lacks_is_refused_on_cuda(
    package: Path, params: Params
) -> None:
    serve = params.serve.model_copy(update={"scheduler": "threshold"})
    with pytest.raises(ValueError, match=r"threshold.*expected prefix or fixed on CUDA"):
        speculative_arguments(package, serve=serve, device="cuda")


def test_more_draft_tokens_than_the_block_holds_are_refused(package: Path, params: Params) -> None:
    serve = params.serve.model_copy(update={"num_draft_tokens": 5})
    with pytest.raises(ValueError, match=r"in 1\.\.4 .* found 5"):
        speculative_arguments(package, serve=serve, device="cpu")


def test_another_model_in_the_package_is_named(tiny_target: Path, params: Params) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not describe a DSpark drafter"):
        speculative_arguments(tiny_target, serve=params.serve, device="cpu")


def test_temperatures_are_the_packages_own_and_a_broken_file_is_named(tmp_path: Path) -> None:
    assert read_temperatures(tmp_path) is None
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"slots": [{"temperature": 1.5}, {"temperature": 1}]}))
    assert read_temperatures(tmp_path) == [1.5, 1.0]
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"calibration\.json is no calibration"):
        read_temperatures(tmp_path)
