"""Trains a drafter on hidden states, cached or as they are made: data/drafter."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stages import contracts
from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter
from stages.dspark.served import check_served
from stages.dspark.slots import anchor_candidates
from stages.dspark.step import Frozen
from stages.dspark.vocab import draft_ids, membership, offsets
from stages.params import DrafterParams, Services, TrainParams
from stages.shards import read_samples
from stages.states.source import Sample, Source
from stages.train import curves, memory, plots, states, warm_start
from stages.train.checkpoint import Progress, load_best
from stages.train.confidence import held_out_blocks
from stages.train.distributed import ALONE, join, parts
from stages.train.loop import Trainer
from stages.train.passes import Passes
from stages.train.start import fresh_drafter, plane_rms
from stages.train.supervision import trained_on
from stages.train.validation import Validator, replay
from stages.train.vocabulary import draft_vocabulary, out_of_vocabulary, token_counts
from stages.weights import TargetWeights, is_tied, load_target_weights

GATE_SAMPLES, GATE_ANCHORS = 8, 4


def run(
    *,
    drafter: DrafterParams,
    train: TrainParams,
    services: Services,
    target: Path,
    hidden_states: Path,
    out: Path,
) -> None:
    """Trains, resuming in run/train-*; publishes config, weights, curve, metrics, gate samples and
    the held-out confidences.

    Raises ValueError when params do not fit the target or no sample can be trained on.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(memory.ONEDNN_PRIMITIVES))
    torch.set_num_threads(services.train.num_threads)
    ranks = join(services.train)
    verify = ranks.local_index == 0  # once a machine
    target_manifest = contracts.read_manifest(target, "target", verify=verify)
    states_manifest = contracts.read_manifest(hidden_states, "extract", verify=verify)
    target_config = json.loads((target / "config.json").read_text())
    config = DrafterConfig.for_target(
        target_config,
        **drafter.shape(),
        layer_ids=tuple(states_manifest.info["layer_ids"]),
        mask_token_id=target_manifest.info["mask_token_id"],
    )
    check_served(
        markov_head=config.markov_head,
        sliding_layers=config.sliding_layers,
        head_dim=config.head_dim,
        experiment=drafter.experiment,
    )
    warm = None if train.warm_start is None else warm_start.read(Path(train.warm_start))
    recipe = contracts.recipe(
        {"drafter": drafter, "train": train},
        {"target": target_manifest, "hidden_states": states_manifest},
    )
    if warm is not None:
        warm_start.check_architecture(warm, config)
        recipe["inputs"]["warm_start"] = warm.checksum
    work = ranks.agreed(contracts.working_folder("train", recipe) if ranks.first else Path())
    samples = [sample for sample in read_samples(hidden_states) if trainable(sample)]
    splits = {
        split: [sample for sample in samples if sample["split"] == split]
        for split in (contracts.TRAIN, contracts.VALIDATION)
    }
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"train: {hidden_states} has no {split} sample with two loss tokens")
    mask = trained_on(splits[contracts.TRAIN], train)
    device = ranks.device(services.train.device)
    needed = memory.estimate(
        config,
        train,
        passes=memory.passes(
            splits[contracts.TRAIN], splits[contracts.VALIDATION], train, ranks=ranks.size
        ),
        tied=is_tied(target_config),
        on_host=device.type == "cpu",
        shards=ranks.size if ranks.sharding == "fsdp2" else 1,
    )
    line = memory.check(needed, device=device, processes=ranks.local_size)
    if ranks.first:
        print(line)
    weights = load_target_weights(target)
    vocab = draft_vocabulary(
        splits[contracts.TRAIN], config, always=target_manifest.info["eos_token_ids"]
    )
    with states.opened(
        hidden_states, states_manifest, samples, target=target, services=services, ranks=ranks
    ) as source:
        if warm is not None:
            vocab = warm_start.vocabulary(
                warm,
                vocab,
                token_counts(splits[contracts.TRAIN], config),
                policy=train.warm_start_vocabulary,
            )
        model = Drafter(config)
        if ranks.first:
            if warm is None:
                model = fresh_drafter(
                    config,
                    seed=train.seed,
                    weights=weights,
                    source=source,
                    samples=splits[contracts.TRAIN],
                )
            else:
                model.load_packaged(warm.tensors())
                model.recondition(plane_rms(source, splits[contracts.TRAIN]))
        ranks.agree_on(model)
        passes = Passes(
            drafter=model.to(device),
            frozen=frozen_tensors(weights, vocab, config, dtype=train.dtype, device=device),
            source=source,
            params=train,
            device=device,
            ranks=ranks,
        )
        validator = Validator.choose(
            splits[contracts.TRAIN],
            splits[contracts.VALIDATION],
            num_anchors=train.validation_anchors,
            num_replayed=train.validation_replay_samples,
        )
        progress = Trainer(
            passes=passes,
            train=splits[contracts.TRAIN],
            mask=mask,
            validator=validator,
            folder=work,
        ).run()
        best = load_best(work, ranks)
        model.load_packaged(parts(best, model))
        unknown = {split: out_of_vocabulary(rows, vocab, config) for split, rows in splits.items()}
        metrics = final_metrics(progress, passes, validator, unknown)
        gate, blocks = {}, {}
        if ranks.first:
            gate = gate_samples(source, splits[contracts.VALIDATION])
            if config.confidence_head:
                alone = replace(passes, drafter=whole(config, best, device), ranks=ALONE)
                held_out = splits[contracts.VALIDATION]
                blocks = held_out_blocks(alone, held_out, draft_vocab=vocab)._asdict()
        refused = ranks.gathered(states.rejected(source))
    ranks.leave()
    if not ranks.first:
        return
    artifact = work / "artifact"
    artifact.mkdir(exist_ok=True)
    _write_outputs(artifact, config, best, vocab, weights, progress, metrics)
    save_file(gate, artifact / "gate.safetensors")
    save_file(blocks, artifact / "confidence.safetensors")
    contracts.write_manifest(
        artifact,
        contracts.Manifest(
            kind="train",
            recipe=recipe,
            counts={split: len(rows) for split, rows in splits.items()} | {"steps": progress.step},
            rejected=dict(Counter(refused.values())),
            info={
                "draft_vocab_sha256": contracts.fingerprint(vocab.tolist()),
                "layer_ids": list(config.layer_ids),
                "tokenizer_sha256": target_manifest.info["tokenizer_sha256"],
            },
        ),
    )
    contracts.publish(artifact, out)
    shutil.rmtree(work)
    print(
        f"train: {progress.step} steps in {progress.train_s:.0f} s, best at {progress.best_step}; "
        f"validation acceptance length {metrics['validation_acceptance_length']:.3f} expected, "
        f"{metrics['validation_greedy_acceptance_length']:.3f} greedy"
    )


def trainable(sample: Sample) -> bool:
    return bool(anchor_candidates(torch.tensor(sample["loss_mask"])).any())


def final_metrics(
    progress: Progress,
    passes: Passes,
    validator: Validator,
    unknown: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """metrics.json, of the best weights: `passes` holds them. Greedy acceptance is over every
    held-out sample. unknown: out_of_vocabulary's result by split."""
    min_blocks = passes.params.validation_min_blocks
    replayed = replay(passes, validator.held_out, domains=validator.domains)
    best = best_validation(progress)
    domains = curves.domain_metrics(replayed, domains=validator.domains)
    for name, entry in domains.items():
        for split, shares in unknown.items():
            entry[f"{split}_out_of_vocabulary"] = shares.get(name)
    expected = [
        f"{split}_acceptance_length{ending}"
        for split in (contracts.VALIDATION, contracts.TRAIN)
        for ending in ("", "_without_looping")
    ]
    return {
        **{name: best[name] for name in expected},
        **curves.lengths("validation_greedy", replayed, min_blocks=min_blocks),
        "domains": domains,
        "positions": curves.position_metrics(replayed, min_blocks=min_blocks),
        "best_step": progress.best_step,
        "steps": progress.step,
        "train_s": round(progress.train_s, 1),
        "draft_vocab_coverage": 1 - unknown[contracts.VALIDATION]["all"],
        **{f"{split}_out_of_vocabulary": shares["all"] for split, shares in unknown.items()},
    }


def whole(config: DrafterConfig, tensors: dict[str, Tensor], device: torch.device) -> Drafter:
    """The packaged drafter on one device, whatever the ranks hold."""
    drafter = Drafter(config)
    drafter.load_packaged(tensors)
    return drafter.to(device)


def best_validation(progress: Progress) -> curves.Row:
    return next(row for row in progress.curve if row["step"] == progress.best_step)


def frozen_tensors(
    weights: TargetWeights,
    vocab: Tensor,
    config: DrafterConfig,
    *,
    dtype: str,
    device: torch.device,
) -> Frozen:
    compute = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    return Frozen(
        embedding=weights.embedding.to(device, compute),
        head=weights.lm_head[vocab].to(device, compute),
        norm=weights.norm.to(device),
        eps=weights.eps,
        draft_id=draft_ids(vocab, vocab_size=config.vocab_size).to(device),
    )


def gate_samples(source: Source, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """A few validation samples for the load gate: states, tokens and block anchors."""
    tensors: dict[str, Tensor] = {}
    with source.read(samples[:GATE_SAMPLES]) as states:
        loaded_samples = zip(samples[:GATE_SAMPLES], states, strict=True)
        for i, (sample, loaded) in enumerate(loaded_samples):
            if loaded is None:
                continue
            anchors = anchor_candidates(torch.tensor(sample["loss_mask"])).nonzero().flatten()
            spread = torch.linspace(0, len(anchors) - 1, min(GATE_ANCHORS, len(anchors))).long()
            tensors[f"planes_{i}"] = loaded.states.flatten(1).clone()
            tensors[f"input_ids_{i}"] = torch.tensor(sample["input_ids"])
            tensors[f"anchors_{i}"] = anchors[spread]
    return tensors


def _write_outputs(
    folder: Path,
    config: DrafterConfig,
    best: dict[str, Tensor],
    vocab: Tensor,
    weights: TargetWeights,
    progress: Progress,
    metrics: dict[str, Any],
) -> None:
    tensors = dict(best)
    if config.reduced_vocab:
        tensors["lm_head.weight"] = weights.lm_head[vocab].float()
        tensors["d2t"] = offsets(vocab)
        tensors["t2d"] = membership(vocab, vocab_size=config.vocab_size)
    save_file(tensors, folder / "model.safetensors")
    contracts.write_json(folder / "config.json", config.to_json())
    contracts.write_json(folder / "metrics.json", metrics)
    _write_table(folder / "curve.csv", progress.curve)
    best_row = best_validation(progress)
    positions = curves.position_rows(best_row, num_slots=config.block_size)
    _write_table(folder / "by_position.csv", positions)
    (folder / "plots").mkdir(exist_ok=True)
    plots.training_curves(
        progress.curve,
        domains=metrics["domains"],
        num_slots=config.block_size,
        path=folder / "plots" / "curves.png",
    )


def _write_table(path: Path, rows: Sequence[curves.Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
