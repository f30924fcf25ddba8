"""The load gate: what counts as agreement, and vLLM's own class against the trained drafter."""

from __future__ import annotations

import json
import shutil
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages import contracts
from stages.dspark.calibration import Blocks
from stages.dspark.draft import Draft
from stages.dspark.rope import Rope
from stages.package import check, gate, stage
from stages.params import PackageParams, Params, Services
from stages.weights import load_target_weights
from tests.conftest import TINY_LAYER_IDS
from tests.random_drafter import config_for, random_samples, random_tensors, write_package

TOLERANCE = 1e-3


def draft(logits: list[list[float]], *, confidence: float = 0.5) -> Draft:
    values = torch.tensor(logits)
    return Draft(values.argmax(-1), values, torch.full((len(logits),), confidence))


CLEAR = [[0.0, 10.0, 1.0], [10.0, 0.0, 1.0], [0.0, 1.0, 10.0]]
TIED = [[0.0, 10.0, 9.999], [10.0, 0.0, 1.0], [0.0, 1.0, 10.0]]


def test_equal_drafts_agree_in_every_slot() -> None:
    found = gate.compare([[draft(CLEAR)]], [[draft(CLEAR)]], logit_tolerance=TOLERANCE)
    assert (found.compared, found.near_ties, found.decided_equal) == (3, 0, 3)
    assert (found.token_agreement, found.logit_error, found.confidence_error) == (1.0, 0.0, 0.0)


def test_a_near_tie_neither_fails_nor_counts_as_agreement() -> None:
    other = [[0.0, 9.999, 10.0], [0.0, 10.0, 1.0], [0.0, 1.0, 10.0]]
    found = gate.compare([[draft(TIED)]], [[draft(other)]], logit_tolerance=TOLERANCE)
    # The slots behind it follow another token, so they are not compared.
    assert (found.slots, found.compared, found.near_ties, found.decided_equal) == (3, 1, 1, 0)
    assert found.token_agreement == 1.0
    assert found.logit_error == pytest.approx(1e-4, rel=1e-2)


def test_a_clear_difference_fails_the_gate_with_its_numbers(params: Params) -> None:
    other = [[0.0, 10.0, 1.0], [0.0, 10.0, 1.0], [0.0, 1.0, 10.0]]
    found = gate.compare([[draft(CLEAR)]], [[draft(other)]], logit_tolerance=TOLERANCE)
    assert found.token_agreement == 0.5
    with pytest.raises(check.PackageError, match="1 of 2 decided tokens equal"):
        gate.check_agreement(found, params.package)


@pytest.mark.parametrize("confidence", [0.6, float("nan")])
def test_confidences_that_differ_or_are_not_numbers_fail(confidence: float, params: Params) -> None:
    found = gate.compare(
        [[draft(CLEAR)]], [[draft(CLEAR, confidence=confidence)]], logit_tolerance=TOLERANCE
    )
    with pytest.raises(check.PackageError, match="confidences within"):
        gate.check_agreement(found, params.package)


def held_out_blocks(num_slots: int) -> Blocks:
    """Overconfident: every logit twice what the drafts are worth."""
    generator = torch.Generator().manual_seed(3)
    truth = torch.rand(4000, num_slots, generator=generator).clamp(0.05, 0.95)
    hits = torch.rand(truth.shape, generator=generator) < truth
    return Blocks(
        confidences=(2 * truth.logit()).sigmoid(),
        accepted=hits.long().cumprod(-1).sum(-1),
        slots=torch.full((4000,), num_slots),
        sample=torch.arange(4000) // 20,
    )


@pytest.fixture(scope="module")
def drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/drafter as train writes it, with random weights."""
    config = config_for(tiny_target, layer_ids=TINY_LAYER_IDS, num_layers=2)
    folder = tmp_path_factory.mktemp("drafter")
    tensors = random_tensors(config, tiny_target)
    write_package(
        folder,
        config,
        {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()},
    )
    save_file(random_samples(config, count=3, last_plane=True), folder / "gate.safetensors")
    save_file(held_out_blocks(config.block_size)._asdict(), folder / "confidence.safetensors")
    contracts.write_json(folder / "metrics.json", {"validation_acceptance_length": 1.5})
    contracts.write_manifest(
        folder,
        contracts.Manifest(
            kind="train", recipe={}, info={"layer_ids": TINY_LAYER_IDS, "tokenizer_sha256": ""}
        ),
    )
    return folder


def make(
    drafter: Path,
    *,
    target: Path,
    package: PackageParams,
    services: Services,
    folder: Path,
) -> Path:
    with chdir(folder):
        stage.run(
            package=package,
            services=services,
            target=target,
            drafter=drafter,
            out=folder / "package",
        )
    return folder / "package"


SHAPES: dict[str, dict[str, Any]] = {
    "no confidence, whole vocabulary, long block": {
        "confidence_head": False,
        "confidence_head_with_markov": False,
        "draft_vocab_size": 49152,
        "block_size": 16,
    },
    "partial YaRN, confidence of the state alone": {
        "confidence_head_with_markov": False,
        "num_layers": 3,
        "rope": Rope(
            theta=1e4,
            type="yarn",
            partial_rotary_factor=0.5,
            attention_factor=1.1,
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=32.0,
            beta_slow=1.0,
        ),
    },
}


@pytest.mark.vllm
@pytest.mark.parametrize("shape", SHAPES)
def test_vllms_class_drafts_the_same_for_every_shape_that_we_say_it_serves(
    shape: str, tiny_target: Path, params: Params, small_services: Services, tmp_path: Path
) -> None:
    config = replace(config_for(tiny_target, layer_ids=TINY_LAYER_IDS), **SHAPES[shape])
    tensors = random_tensors(config, tiny_target)
    folder = write_package(tmp_path / "package", config, tensors)
    samples = random_samples(config, count=2, last_plane=False)
    ours = gate.trained_drafts(
        samples,
        config=config,
        tensors=tensors,
        draft_vocab=check.draft_vocabulary(config, tensors),
        target=load_target_weights(tiny_target),
    )
    theirs = gate.served_drafts(
        samples, package=folder, target=tiny_target, services=small_services
    )
    tolerance = params.package.logit_tolerance
    agreement = gate.compare(ours, theirs, logit_tolerance=tolerance)
    gate.check_agreement(agreement, params.package)
    assert agreement.decided > 10


@pytest.mark.vllm
def test_vllms_class_drafts_what_the_trained_drafter_drafts(
    drafter: Path,
    tiny_target: Path,
    params: Params,
    small_services: Services,
    tmp_path: Path,
) -> None:
    out = make(
        drafter,
        target=tiny_target,
        package=params.package,
        services=small_services,
        folder=tmp_path,
    )
    manifest = contracts.read_manifest(out, "package")
    assert manifest.info["gate"]["token_agreement"] == 1.0
    assert manifest.counts["gate_blocks"] == 9
    body = json.loads((out / "config.json").read_text())
    assert body["sample_from_anchor"] is True
    name = contracts.read_manifest(tiny_target, "target").info["name"]
    assert body["speculators_config"]["verifier"]["name_or_path"] == name
    assert {p.name for p in out.iterdir()} == {
        "README.md",
        "calibration.json",
        "config.json",
        "manifest.json",
        "model.safetensors",
        "provenance.json",
    }
    weights = load_file(out / "model.safetensors")
    assert weights["fc.weight"].dtype == torch.bfloat16
    assert weights["d2t"].dtype == torch.int64
    slots = json.loads((out / "calibration.json").read_text())["slots"]
    assert len(slots) == config_for(tiny_target, layer_ids=TINY_LAYER_IDS).block_size
    assert slots[0]["temperature"] == pytest.approx(2.0, rel=0.25)
    assert slots[0]["after"]["ece"] < slots[0]["before"]["ece"]


@pytest.mark.vllm
def test_weights_that_changed_on_the_way_fail_the_gate(
    drafter: Path, tiny_target: Path, params: Params, small_services: Services, tmp_path: Path
) -> None:
    """Query and key norms exchanged: every shape fits, and vLLM loads it without a word."""
    package = tmp_path / "package"
    shutil.copytree(drafter, package, ignore=shutil.ignore_patterns("gate*", "confidence*", "man*"))
    tensors = stage.to_bfloat16(load_file(drafter / "model.safetensors"))
    spoiled = dict(tensors)
    names = [f"layers.0.self_attn.{name}_norm.weight" for name in "qk"]
    spoiled[names[0]] = 3 * tensors[names[1]]
    save_file(spoiled, package / "model.safetensors")
    config = config_for(tiny_target, layer_ids=TINY_LAYER_IDS, num_layers=2)
    samples = random_samples(config, count=2, last_plane=False)
    trained = gate.trained_drafts(
        samples,
        config=config,
        tensors=tensors,
        draft_vocab=check.draft_vocabulary(config, tensors),
        target=load_target_weights(tiny_target),
    )
    served = gate.served_drafts(
        samples, package=package, target=tiny_target, services=small_services
    )
    found = gate.compare(trained, served, logit_tolerance=TOLERANCE)
    with pytest.raises(check.PackageError, match="vLLM drafts otherwise"):
        gate.check_agreement(found, params.package)


def test_a_drafter_of_another_layout_is_never_packaged(
    drafter: Path,
    tiny_target: Path,
    params: Params,
    small_services: Services,
    tmp_path: Path,
) -> None:
    spoiled = tmp_path / "spoiled"
    shutil.copytree(drafter, spoiled)
    body = json.loads((spoiled / "config.json").read_text())
    del body["sample_from_anchor"]
    (spoiled / "config.json").write_text(json.dumps(body))
    manifest = contracts.read_manifest(drafter, "train")
    contracts.write_manifest(spoiled, manifest)
    with pytest.raises(check.PackageError, match="sample_from_anchor"):
        make(
            spoiled,
            target=tiny_target,
            package=params.package,
            services=small_services,
            folder=tmp_path,
        )
    assert not (tmp_path / "package").exists()
