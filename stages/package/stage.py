"""Turns a trained drafter into the folder that vLLM loads, checked: data/drafter -> package.

Cost: one start of vLLM's model class, about 15 s.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages import contracts
from stages.dspark import calibration
from stages.dspark.config import DrafterConfig
from stages.package import card, check, gate
from stages.params import PackageParams, Services
from stages.weights import load_target_weights


def run(
    *,
    package: PackageParams,
    services: Services,
    target: Path,
    drafter: Path,
    out: Path,
) -> None:
    """Writes, checks and publishes the package.

    Raises check.PackageError where the structure is wrong or the load gate finds a difference; then
    nothing is published.
    """
    target_manifest = contracts.read_manifest(target, "target")
    drafter_manifest = contracts.read_manifest(drafter, "train")
    inputs = {"target": target_manifest, "drafter": drafter_manifest}
    recipe = contracts.recipe({"package": package}, inputs)
    work = contracts.working_folder("package", recipe)
    shutil.rmtree(work)  # nothing here is worth resuming
    work.mkdir()

    trained = load_file(drafter / "model.safetensors")
    body = json.loads((drafter / "config.json").read_text())
    body["speculators_config"]["verifier"]["name_or_path"] = target_manifest.info["name"]
    contracts.write_json(work / "config.json", body)
    rounded = to_bfloat16(trained)
    save_file(rounded, work / "model.safetensors", metadata={"format": "pt"})

    weights = load_target_weights(target)
    config, _ = check.check_package(
        work,
        target=weights,
        layer_ids=drafter_manifest.info["layer_ids"],
        mask_token_id=target_manifest.info["mask_token_id"],
        num_layers=target_manifest.info["num_layers"],
    )
    samples = gate.gate_samples(
        load_file(drafter / "gate.safetensors"),
        width=len(config.layer_ids) * config.hidden_size,
        limit=package.gate_prompts,
    )
    agreement = gate.compare(
        gate.trained_drafts(
            samples,
            config=config,
            tensors=rounded,
            draft_vocab=check.draft_vocabulary(config, rounded),
            target=weights,
        ),
        gate.served_drafts(samples, package=work, target=target, services=services),
        logit_tolerance=package.logit_tolerance,
    )
    numbers = gate.check_agreement(agreement, package)
    fit = fitted(drafter, config, package=package)
    if fit is not None:
        contracts.write_json(work / contracts.CALIBRATION, fit)
    _write_papers(work, config, package=package, inputs=inputs, recipe=recipe, drafter=drafter)
    contracts.write_manifest(
        work,
        contracts.Manifest(
            kind="package",
            recipe=recipe,
            counts={"gate_blocks": agreement.blocks, "gate_slots": agreement.compared},
            info={
                "name": package.name,
                "gate": numbers,
                "block_size": config.block_size,
                "tokenizer_sha256": target_manifest.info["tokenizer_sha256"],
            },
        ),
    )
    contracts.publish(work, out)
    print(f"package: {package.name} in {out}; load gate: {agreement}")
    if fit is not None:
        print(f"package: {_calibration_line(fit)}")


def fitted(
    drafter: Path, config: DrafterConfig, *, package: PackageParams
) -> dict[str, Any] | None:
    """calibration.json from the trainer's held-out blocks; None without a confidence head."""
    if not config.confidence_head:
        return None
    return calibration.fit(
        calibration.Blocks(**load_file(drafter / "confidence.safetensors")),
        min_blocks=package.calibration_min_blocks,
        max_temperature=package.calibration_max_temperature,
    )


def _calibration_line(body: dict[str, Any]) -> str:
    parts = [
        f"{slot['slot']}: T {slot['temperature']:.2f}, error {slot['before']['ece']:.3f} -> "
        f"{slot['after']['ece']:.3f}"
        for slot in body["slots"]
        if slot["before"]["ece"] is not None
    ]
    return f"confidences calibrated on {body['blocks']} held-out blocks; slot {'; '.join(parts)}"


def to_bfloat16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights in bfloat16; the vocabulary maps keep their integer and boolean types."""
    return {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in tensors.items()
    }


def _write_papers(
    work: Path,
    config: DrafterConfig,
    *,
    package: PackageParams,
    inputs: dict[str, contracts.Manifest],
    recipe: dict[str, Any],
    drafter: Path,
) -> None:
    info = inputs["target"].info
    (work / "README.md").write_text(
        card.model_card(
            config,
            name=package.name,
            target=info["name"],
            licence=info.get("license"),
            metrics=json.loads((drafter / "metrics.json").read_text()),
        )
    )
    contracts.write_json(
        work / "provenance.json",
        {
            "recipe": recipe,
            "inputs": {
                name: {
                    "recipe": manifest.recipe,
                    "fingerprint": manifest.fingerprint,
                    "content": manifest.content,
                    "info": manifest.info,
                }
                for name, manifest in inputs.items()
            },
            "versions": contracts.installed_versions(),
        },
    )
