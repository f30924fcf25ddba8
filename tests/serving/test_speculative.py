"""The flags that make vLLM serve a package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.serving.speculative import WORKER_CLASS, speculative_arguments
from tests.conftest import TINY_LAYER_IDS
from tests.random_drafter import config_for


@pytest.fixture
def package(tiny_target: Path, tmp_path: Path) -> Path:
    config = config_for(tiny_target, layer_ids=TINY_LAYER_IDS)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    return tmp_path


def test_cpu_gets_our_worker_and_cuda_the_engines_own_method(package: Path) -> None:
    on_cpu = speculative_arguments(package, num_speculative_tokens=4, device="cpu")
    on_cuda = speculative_arguments(package, num_speculative_tokens=3, device="cuda")
    assert on_cpu[2:] == ["--worker-cls", WORKER_CLASS]
    assert json.loads(on_cpu[1])["method"] == "dflash"
    assert on_cuda[0] == "--speculative-config"
    assert json.loads(on_cuda[1]) == {
        "method": "dspark",
        "model": str(package),
        "num_speculative_tokens": 3,
    }


def test_more_draft_tokens_than_the_block_holds_are_refused(package: Path) -> None:
    with pytest.raises(ValueError, match=r"in 1\.\.4 .* found 5"):
        speculative_arguments(package, num_speculative_tokens=5, device="cpu")


def test_another_model_in_the_package_is_named(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not describe a DSpark drafter"):
        speculative_arguments(tiny_target, num_speculative_tokens=1, device="cpu")
