"""Drives vLLM's own drafter model: a block of drafts from its backbone's output. Runs inside vLLM.

Shapes: B requests, N draft tokens a request, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.platforms import current_platform


class Block(NamedTuple):
    """What one pass drafts; ids are the target's."""

    tokens: torch.Tensor  # int64 [B, N]
    logits: torch.Tensor  # float32 [B, N, Vd], Markov bias included
    confidences: torch.Tensor  # float32 [B, N], probability that the token is accepted; else ones
    probabilities: torch.Tensor | None  # float32 [B, N, V] that a sampled token was drawn from


def draft_block(
    model: Qwen3DSparkForCausalLM,
    hidden: torch.Tensor,
    *,
    anchors: torch.Tensor,
    temperature: torch.Tensor | None = None,
) -> Block:
    """Drafts from the backbone's output, slot by slot under the Markov bias.

    hidden is [B, N, H], anchors [B] holds the token each block starts from. Base logits are
    computed for all slots at once; the sum with the bias is float32, so that it decides between
    candidates that bfloat16 would round to a tie.
    temperature: float32 [B], 0 for a request that decodes greedily; None where all do.
    """
    num_requests, num_slots, hidden_size = hidden.shape
    flat = hidden.reshape(-1, hidden_size)
    logits = model.compute_draft_logits(flat).float().view(num_requests, num_slots, -1)
    tokens = torch.empty(num_requests, num_slots, dtype=torch.int64, device=hidden.device)
    embeddings, drawn_from = [], []
    previous = anchors.long()
    for slot in range(num_slots):
        embedding = model.markov_embed(previous)
        embeddings.append(embedding)
        biased = logits[:, slot].add_(model.markov_bias(embedding))
        drafted = biased.argmax(dim=-1)
        if temperature is not None:
            greedy = temperature == 0
            scale = torch.where(greedy, 1.0, temperature).unsqueeze(-1)
            probabilities = (biased / scale).softmax(dim=-1)
            # The largest of p / Exp(1) is a draw from p.
            noise = torch.empty_like(probabilities).exponential_()
            drafted = torch.where(greedy, drafted, (probabilities / noise).argmax(dim=-1))
            drawn_from.append(probabilities)
        previous = model.map_draft_to_target(drafted)
        tokens[:, slot] = previous
    confidences = torch.ones(tokens.shape, device=hidden.device)
    if model.model.confidence_head is not None:
        markov = torch.stack(embeddings, dim=1).flatten(0, 1)
        confidences = model.compute_confidence(flat, markov).view(num_requests, num_slots)
    probabilities = over_vocabulary(model, torch.stack(drawn_from, dim=1)) if drawn_from else None
    return Block(tokens, logits, confidences, probabilities)


def over_vocabulary(model: Qwen3DSparkForCausalLM, probabilities: torch.Tensor) -> torch.Tensor:
    """[B, N, V] from [B, N, Vd]: zero for what cannot be drafted."""
    draft_size, size = probabilities.shape[-1], model.config.vocab_size
    if draft_size == size:
        return probabilities
    ids = model.map_draft_to_target(torch.arange(draft_size, device=probabilities.device))
    return probabilities.new_zeros(*probabilities.shape[:-1], size).index_copy_(
        -1, ids, probabilities
    )


def norm_context_keys_by_layer(model: Qwen3DSparkForCausalLM) -> None:
    """Gives every layer's context keys their own norm on CPU, where vLLM 0.32 gives them layer 0's.

    Its model norms the keys [L, T, heads, head_dim] of all layers in one rms_norm call with gains
    [L, head_dim]; the CPU kernel reads the first row for all of them (the CUDA kernel does not),
    which spoils drafts of two layers and more without a word. Here it is one call a layer.
    """
    if not current_platform.is_cpu():
        return
    backbone = model.model

    def norm(keys: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(keys)
        for layer, gain in enumerate(backbone._k_norm_weights):
            ops.rms_norm(normed[layer], keys[layer], gain, backbone._rms_norm_eps)
        return normed

    backbone._normalize_context_k = norm
