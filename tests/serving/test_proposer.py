"""Drafting in a real vLLM engine (CPU, float32, tiny target): lossless, and as our model drafts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.dspark.config import DrafterConfig
from stages.dspark.draft import draft_greedy
from stages.dspark.model import Drafter
from stages.dspark.vocab import check_d2t
from stages.params import Services
from stages.serving.plans import vllm_environment
from stages.weights import load_target_weights
from tests.conftest import TINY_LAYER_IDS
from tests.random_drafter import config_for, random_tensors, teach_bigrams, write_package

pytestmark = pytest.mark.vllm
LENGTHS = (5, 33, 70, 40, 12)
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 40_000, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def package(
    tiny_target: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A random drafter whose Markov head knows a share of the target's own bigrams."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    config = config_for(tiny_target, layer_ids=TINY_LAYER_IDS, num_layers=2)
    tensors = random_tensors(config, tiny_target)
    with torch.inference_mode():
        spoken = [
            model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)[
                0
            ].tolist()[len(prompt) - 1 :]
            for prompt in prompts
        ]
    teach_bigrams(tensors, spoken, config, tiny_target)
    return write_package(tmp_path_factory.mktemp("taught") / "package", config, tensors)


@pytest.fixture(scope="module")
def recorded(
    package: Path,
    tiny_target: Path,
    prompts: list[list[int]],
    small_services: Services,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recorded")
    settings = {
        "prompts": prompts,
        "target": str(tiny_target),
        "package": str(package),
        "max_tokens": MAX_TOKENS,
        "max_model_len": 256,
        "kv_block_size": 32,
        "kv_cache_bytes": 2**28,
        "num_speculative_tokens": 4,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("record_drafts.py")
    environment = {**os.environ, **vllm_environment(small_services)}
    environment["PYTHONPATH"] += os.pathsep + str(script.parent)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    finished = subprocess.run(
        [sys.executable, str(script), str(folder / "settings.json"), str(folder / "out.pt")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert "Active proposer: DSparkProposer" in finished.stdout
    recorded: dict[str, Any] = torch.load(folder / "out.pt")
    return recorded


def test_greedy_output_is_the_plain_engines_and_drafts_are_accepted_partly(
    recorded: dict[str, Any],
) -> None:
    """One request at a time, then all together with the first run's prefixes cached."""
    result = recorded["result"]
    assert result["batch_1"] == result["plain"]
    assert result["batch_all"] == result["plain"]
    drafted = 4 * result["num_drafts"]
    assert 0.1 * drafted < result["num_accepted_tokens"] < 0.9 * drafted


def test_every_draft_is_the_one_our_model_makes_from_the_same_states(
    recorded: dict[str, Any], package: Path, tiny_target: Path
) -> None:
    """Catches what losslessness cannot: rejected tokens as context, wrong positions."""
    config = DrafterConfig.from_json(json.loads((package / "config.json").read_text()))
    tensors = load_file(package / "model.safetensors")
    drafter = Drafter(config).float()
    drafter.load_packaged(tensors)
    target = load_target_weights(tiny_target)
    planes = torch.zeros(256, len(config.layer_ids) * config.hidden_size)
    confidence_error, differing = 0.0, 0
    for one in recorded["passes"]:
        planes[one["positions"]] = one["states"]
        length = int(one["positions"][-1]) + 1 - int(one["rejected"])
        draft = draft_greedy(
            drafter,
            embedding=target.embedding.float(),
            lm_head=tensors["lm_head.weight"].float(),
            draft_vocab=check_d2t(tensors["d2t"], vocab_size=config.vocab_size),
            planes=planes[:length],
            anchor=int(one["anchor"]),
        )
        differing += int((draft.tokens != one["drafts"]).any())
        difference = (draft.confidences - one["confidences"]).abs().max()
        confidence_error = max(confidence_error, float(difference))
    assert len(recorded["passes"]) > 50
    assert sum(int(one["rejected"]) > 0 for one in recorded["passes"]) > 10
    assert differing == 0
    assert confidence_error < 1e-4


def test_packages_that_would_be_served_wrongly_are_refused(recorded: dict[str, Any]) -> None:
    refusals = recorded["refusals"]
    assert set(refusals) == {"dflash", "layout", "heads", "windows", "too many tokens"}
    assert "expected 1..4" in refusals["too many tokens"]
    assert "DFlashDraftModel" in refusals["dflash"]
