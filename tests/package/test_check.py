"""Structural faults of a package are refused before vLLM sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages import contracts
from stages.package.check import PackageError, check_package
from stages.weights import load_target_weights
from tests.conftest import TINY_LAYER_IDS, TINY_LAYERS
from tests.random_drafter import config_for, random_tensors, write_package


@pytest.fixture
def package(tiny_target: Path, tmp_path: Path) -> Path:
    config = config_for(tiny_target, layer_ids=TINY_LAYER_IDS)
    return write_package(tmp_path / "package", config, random_tensors(config, tiny_target))


def check(package: Path, target: Path) -> None:
    check_package(
        package,
        target=load_target_weights(target),
        layer_ids=TINY_LAYER_IDS,
        mask_token_id=contracts.read_manifest(target, "target").info["mask_token_id"],
        num_layers=TINY_LAYERS,
    )


def test_a_whole_package_passes(package: Path, tiny_target: Path) -> None:
    check(package, tiny_target)


CONFIG_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "layout not written": (lambda body: body.pop("sample_from_anchor"), "sample_from_anchor true"),
    "layout false": (lambda body: body.update(sample_from_anchor=False), "sample_from_anchor true"),
    "layer ids out of order": (
        lambda body: body.update(aux_hidden_state_layer_ids=TINY_LAYER_IDS[::-1]),
        "aux_hidden_state_layer_ids",
    ),
    "layer ids shifted": (
        lambda body: body.update(aux_hidden_state_layer_ids=[i + 1 for i in TINY_LAYER_IDS]),
        "aux_hidden_state_layer_ids",
    ),
    "another mask token": (lambda body: body.update(mask_token_id=7), "mask_token_id"),
    "a model type": (lambda body: body.update(model_type="qwen3"), "model_type"),
    "another kind of head": (lambda body: body.update(markov_head_type="gated"), "an experiment"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_faulty_config_is_refused(fault: str, package: Path, tiny_target: Path) -> None:
    spoil, message = CONFIG_FAULTS[fault]
    body = json.loads((package / "config.json").read_text())
    spoil(body)
    (package / "config.json").write_text(json.dumps(body))
    with pytest.raises(PackageError, match=message):
        check(package, tiny_target)


def swap_d2t(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][[3, 4]] = tensors["d2t"][[4, 3]] + torch.tensor([1, -1])


def shift_vocabulary(tensors: dict[str, Tensor]) -> None:
    """A valid map with a consistent t2d, but of another vocabulary than lm_head's."""
    vocab = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    moved = next(int(v) + 1 for v in vocab if int(v) + 1 not in set(vocab.tolist()))
    index = int((vocab == moved - 1).nonzero())
    tensors["t2d"][moved - 1], tensors["t2d"][moved] = False, True
    tensors["d2t"][index] += 1


def leave_vocabulary(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][-1] += 100_000


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "d2t swapped": (swap_d2t, "distinct ascending"),
    "d2t outside": (leave_vocabulary, "distinct ascending"),
    "d2t of another vocabulary": (shift_vocabulary, "not the target's head"),
    "t2d inconsistent": (lambda t: t["t2d"].logical_not_(), "t2d does not mark"),
    "not finite": (lambda t: t["fc.weight"].view(-1)[:1].fill_(float("nan")), "not finite"),
    "no confidence head": (lambda t: t.pop("confidence_head.proj.weight"), "found nothing"),
    "another shape": (lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1]}), "fc.weight"),
    "an unknown tensor": (lambda t: t.update(extra=torch.ones(1)), "expected nothing"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_faulty_tensors_are_refused(fault: str, package: Path, tiny_target: Path) -> None:
    spoil, message = TENSOR_FAULTS[fault]
    tensors = load_file(package / "model.safetensors")
    spoil(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, package / "model.safetensors")
    with pytest.raises(PackageError, match=message):
        check(package, tiny_target)
