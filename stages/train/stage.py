"""Trains a drafter on cached hidden states: data/hidden_states -> data/drafter."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stages import contracts
from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter
from stages.dspark.slots import anchor_candidates
from stages.dspark.step import Frozen
from stages.dspark.vocab import choose_vocab, draft_ids, membership, offsets
from stages.params import DrafterParams, Services, TrainParams
from stages.shards import ShardReader
from stages.train.checkpoint import load_best
from stages.train.loop import Trainer
from stages.train.passes import Passes, Sample
from stages.train.validation import replay
from stages.weights import TargetWeights, load_target_weights

GATE_SAMPLES, GATE_ANCHORS = 8, 4
RMS_SAMPLES = 64


def run(
    *,
    drafter: DrafterParams,
    train: TrainParams,
    services: Services,
    target: Path,
    hidden_states: Path,
    out: Path,
) -> None:
    """Trains, resuming in run/train-*; publishes config, weights, curve, metrics and gate samples.

    Raises ValueError when params do not fit the target or no sample can be trained on.
    """
    torch.set_num_threads(services.train.num_threads)
    target_manifest = contracts.read_manifest(target, "target")
    states_manifest = contracts.read_manifest(hidden_states, "extract")
    recipe = contracts.recipe(
        {"drafter": drafter, "train": train},
        {"target": target_manifest, "hidden_states": states_manifest},
    )
    work = contracts.working_folder("train", recipe)
    reader = ShardReader(hidden_states, states_manifest)
    samples = reader.samples()
    splits = {
        split: [s for s in samples if s["split"] == split and trainable(s)]
        for split in (contracts.TRAIN, contracts.VALIDATION)
    }
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"train: {hidden_states} has no {split} sample with two loss tokens")
    config = DrafterConfig.for_target(
        json.loads((target / "config.json").read_text()),
        **drafter.model_dump(),
        layer_ids=tuple(states_manifest.info["layer_ids"]),
        mask_token_id=target_manifest.info["mask_token_id"],
    )
    weights = load_target_weights(target)
    vocab = draft_vocabulary(
        splits[contracts.TRAIN], config, always=target_manifest.info["eos_token_ids"]
    )
    device = torch.device(services.train.device)
    model = Drafter(config)
    model.initialise(seed=train.seed, target_norm=weights.norm)
    model.condition(plane_rms(reader, splits[contracts.TRAIN]))
    passes = Passes(
        drafter=model.to(device),
        frozen=frozen_tensors(weights, vocab, config, dtype=train.dtype, device=device),
        reader=reader,
        params=train,
        device=device,
    )
    progress = Trainer(
        passes=passes,
        train=splits[contracts.TRAIN],
        validation=splits[contracts.VALIDATION],
        folder=work,
    ).run()
    best = load_best(work)
    model.load_packaged(best)
    replayed = replay(passes, splits[contracts.VALIDATION])
    metrics = {
        "validation_acceptance_length": progress.best_acceptance_length,
        "validation_greedy_acceptance_length": macro(replayed),
        "domains": replayed,
        "best_step": progress.best_step,
        "steps": progress.step,
        "train_s": round(progress.train_s, 1),
        "draft_vocab_coverage": coverage(splits[contracts.VALIDATION], vocab, config),
    }
    artifact = work / "artifact"
    artifact.mkdir(exist_ok=True)
    _write_outputs(artifact, config, best, vocab, weights, progress.curve, metrics)
    save_file(gate_samples(reader, splits[contracts.VALIDATION]), artifact / "gate.safetensors")
    contracts.write_manifest(
        artifact,
        contracts.Manifest(
            kind="train",
            recipe=recipe,
            counts={split: len(rows) for split, rows in splits.items()} | {"steps": progress.step},
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


def draft_vocabulary(
    samples: Sequence[Sample], config: DrafterConfig, *, always: list[int]
) -> Tensor:
    """The draft vocabulary, int64 [Vd] target ids, by frequency among the tokens with loss."""
    counts = torch.zeros(config.vocab_size, dtype=torch.int64)
    for sample in samples:
        tokens = torch.tensor(sample["input_ids"])[torch.tensor(sample["loss_mask"])]
        counts += torch.bincount(tokens, minlength=config.vocab_size)
    return choose_vocab(counts, size=config.draft_vocab_size, always=always)


def coverage(samples: Sequence[Sample], vocab: Tensor, config: DrafterConfig) -> float:
    """Share of the samples' loss tokens that the drafter can propose."""
    known = membership(vocab, vocab_size=config.vocab_size)
    tokens = torch.cat(
        [torch.tensor(s["input_ids"])[torch.tensor(s["loss_mask"])] for s in samples]
    )
    return float(known[tokens].float().mean())


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


def plane_rms(reader: ShardReader, samples: Sequence[Sample]) -> Tensor:
    """Root mean square of every captured channel, float32 [A*H], over a spread of samples.

    Without first tokens: attention sinks hold values a hundred times larger there.
    """
    total, count = torch.zeros(()), 0
    for sample in samples[:: max(1, len(samples) // RMS_SAMPLES)]:
        states = torch.from_numpy(reader.read(sample)).view(torch.bfloat16)[1:, :-1]
        total = total + states.flatten(1).float().square().sum(0)
        count += len(states)
    return (total / max(count, 1)).sqrt()


def gate_samples(reader: ShardReader, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """A few validation samples for the load gate: states, tokens and block anchors."""
    tensors: dict[str, Tensor] = {}
    for i, sample in enumerate(samples[:GATE_SAMPLES]):
        anchors = anchor_candidates(torch.tensor(sample["loss_mask"])).nonzero().flatten()
        spread = torch.linspace(0, len(anchors) - 1, min(GATE_ANCHORS, len(anchors))).long()
        states = torch.from_numpy(reader.read(sample)).view(torch.bfloat16)
        tensors[f"planes_{i}"] = states.reshape(sample["num_tokens"], -1).clone()
        tensors[f"input_ids_{i}"] = torch.tensor(sample["input_ids"])
        tensors[f"anchors_{i}"] = anchors[spread]
    return tensors


def macro(replayed: dict[str, dict[str, float]]) -> float:
    return sum(entry["acceptance_length"] for entry in replayed.values()) / len(replayed)


def _write_outputs(
    folder: Path,
    config: DrafterConfig,
    best: dict[str, Tensor],
    vocab: Tensor,
    weights: TargetWeights,
    curve: list[dict[str, float]],
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
    with (folder / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(curve[0]))
        writer.writeheader()
        writer.writerows(curve)
