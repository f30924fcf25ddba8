"""speculators 0.9.0's DSparkDraftModel, its loss and its optimisers on the CPU.

Its trainer moves the model to an accelerator, asks for a Triton loss and for flex attention, which
has no CPU backward; so its model is called as its trainer calls it (float32 weights, autocast, clip
at 1.0), with loss_implementation "eager" and sdpa attention. Only the draw of anchors is replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.problem import Problem
from stages.dspark.step import LossWeights
from stages.dspark.vocab import membership, offsets


def build_model(problem: Problem, weights: Mapping[str, Tensor]) -> nn.Module:
    """Its model in float32 with the weights of our drafter (they carry the same names) and the
    problem's frozen tensors. Draws the problem's anchors from then on, in this whole process."""
    from speculators.models.dflash import core
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    config, frozen = problem.config, problem.frozen
    body = {key: value for key, value in config.to_json().items() if key != "architectures"}
    settings = DSparkSpeculatorConfig(**body)
    settings.transformer_layer_config._attn_implementation = "sdpa"
    model: nn.Module = DSparkDraftModel(config=settings).float()
    tensors = {name: value.detach().clone() for name, value in weights.items()}
    tensors |= {
        "embed_tokens.weight": frozen.embedding,
        "lm_head.weight": frozen.head,
        "verifier_lm_head.weight": frozen.head,
        "verifier_norm.weight": frozen.norm,
    }
    if config.reduced_vocab:
        tensors["t2d"] = membership(problem.vocab, vocab_size=config.vocab_size)
        tensors["d2t"] = offsets(problem.vocab)
    model.load_state_dict(tensors, strict=True)
    anchors = problem.packed_anchors()
    valid = torch.ones_like(anchors, dtype=torch.bool)
    core.select_anchors = lambda *_, **__: (anchors, valid)
    return model


def call_arguments(problem: Problem, weights: LossWeights) -> dict[str, Any]:
    """Arguments of its forward pass: the packed row, and the loss with our weights in its
    convention (its TV is half the L1 distance; gamma instead of a base of the decay)."""
    from speculators.losses import resolve_loss_config

    terms = {"ce": weights.ce, "tv": 2 * weights.tv, "kl_div": weights.kl}
    used = json.dumps({name: weight for name, weight in terms.items() if weight})

    batch = problem.batch
    documents = torch.arange(len(problem.lengths)).unsqueeze(-1).expand_as(batch.input_ids)
    positions = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    return {
        "hidden_states": problem.packed(batch.planes),
        "input_ids": problem.packed(batch.input_ids),
        "loss_mask": problem.packed(batch.loss_mask),
        "verifier_last_hidden_states": problem.packed(batch.last),
        "document_ids": problem.packed(documents),
        "position_ids": problem.packed(positions),
        "loss_config": resolve_loss_config(used, "eager"),
        "tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0],
        "gamma": -1 / math.log(weights.position_decay),
        "max_anchors": batch.anchors.numel(),
        "confidence_head_alpha": weights.confidence,
    }


def build_optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """Its optimisers with the defaults of its command line, where `kind` is "muon" (the default)
    or "adamw"."""
    from speculators.train.config.schema import OptimizerArgs
    from speculators.train.optimizers import build_optimizers as build

    settings = OptimizerArgs(optimizer=kind)
    settings.muon_lr = settings.lr  # its own rule where muon_lr is not given
    optimizers: list[torch.optim.Optimizer] = build(model, settings)
    return optimizers
