"""One pass of the drafter over a batch of documents, with its loss and its acceptance.

Shapes: B documents, T tokens (padded), A planes, H hidden size, M blocks a document, N slots,
P supervised slots, U distinct target states, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.dspark.loss import (
    SlotTargets,
    TermWeights,
    best_draftable,
    confidence_loss,
    dpace_weights,
    label_probability,
    position_weights,
    slot_loss,
)
from stages.dspark.model import Drafter
from stages.dspark.slots import SlotTable, slot_table


class Batch(NamedTuple):
    planes: Tensor  # [B, T, A*H] captured states
    last: Tensor  # [B, T, H] the last layer's output, before the final norm
    input_ids: Tensor  # int64 [B, T]
    loss_mask: Tensor  # bool [B, T], False in padding
    log_sum_exp: Tensor  # float32 [B, T], of the target's full-vocabulary logits; 0 without loss
    anchors: Tensor  # int64 [B, M], -1 for absent


class Frozen(NamedTuple):
    """The target's own tensors, shared and never trained."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [Vd, H] rows of the logit head
    norm: Tensor  # [H]
    eps: float
    draft_id: Tensor  # int64 [V], -1 outside the draft vocabulary


class LossWeights(NamedTuple):
    ce: float
    tv: float
    kl: float
    confidence: float
    ce_label: Literal["next_token", "target_argmax"]
    position_weighting: Literal["decay", "dpace"]
    position_decay: float  # of decay
    dpace_smoothing: float  # of dpace


class StepResult(NamedTuple):
    """Numerators and denominators, so that batches and ranks add up exactly."""

    loss: Tensor  # scalar with gradient, to be divided by `weight`
    weight: Tensor  # scalar
    accept: Tensor  # float32 [B, M, N] overlap with the target's distribution, 0 where not valid
    match: Tensor  # bool [B, M, N] the draft's argmax is the next token
    valid: Tensor  # bool [B, M, N]


class Blocks(NamedTuple):
    table: SlotTable
    anchors: Tensor  # int64 [B, M] tokens that blocks start from; any for an absent block
    states: Tensor  # [B, M, N, H] the backbone's output


def run_backbone(drafter: Drafter, batch: Batch, frozen: Frozen) -> Blocks:
    table = slot_table(batch.anchors, batch.loss_mask, block_size=drafter.config.block_size)
    anchors = batch.input_ids.gather(1, batch.anchors.clamp(min=0))
    dtype = batch.planes.dtype
    states = drafter(
        batch.planes,
        batch.anchors,
        F.embedding(anchors, frozen.embedding).to(dtype),
        frozen.embedding[drafter.config.mask_token_id].to(dtype),
    )
    return Blocks(table, anchors, states)


def forward_batch(
    drafter: Drafter, batch: Batch, frozen: Frozen, *, weights: LossWeights
) -> StepResult:
    """Runs backbone and heads teacher-forced: a slot's previous token is the true one."""
    num_tokens = batch.input_ids.shape[1]
    table, _, states = run_backbone(drafter, batch, frozen)
    valid = table.valid
    document = torch.arange(len(valid), device=valid.device).view(-1, 1, 1).expand_as(valid)
    previous = batch.input_ids[document, table.position]
    following = batch.input_ids[document[valid], table.target[valid]]
    judged = document[valid] * num_tokens + table.position[valid]
    used, index = judged.unique(return_inverse=True)
    normed = F.rms_norm(
        batch.last.flatten(0, 1)[used].float(), frozen.norm.shape, frozen.norm.float(), frozen.eps
    )
    target_states = normed.to(frozen.head.dtype)
    draft_id = label = frozen.draft_id[following]
    if weights.ce_label == "target_argmax":
        label = best_draftable(target_states, frozen.head)[index]
    targets = SlotTargets(
        states=target_states,
        log_sum_exp=batch.log_sum_exp.flatten()[used],
        index=index,
        draft_id=draft_id,
        label=label,
    )
    embeddings, latents = drafter.markov(previous, states, valid)
    supervised, markov_w2 = states[valid], drafter.markov_w2
    slot_weight, denominator = position_weights(valid, decay=weights.position_decay), None
    if weights.position_weighting == "dpace":
        probability = label_probability(
            supervised, latents, head=frozen.head, markov_w2=markov_w2, label=targets.label
        )
        slot_weight = dpace_weights(
            probability.new_zeros(valid.shape).masked_scatter(valid, probability),
            valid,
            smoothing=weights.dpace_smoothing,
        )
        denominator = valid.sum()
    weight = slot_weight[valid]
    slots = slot_loss(
        supervised,
        latents,
        head=frozen.head,
        markov_w2=markov_w2,
        targets=targets,
        weight=weight,
        terms=TermWeights(ce=weights.ce, tv=weights.tv, kl=weights.kl),
    )
    loss = slots.loss
    if drafter.confidence_head is not None:
        confidence = drafter.confidence_head(supervised, embeddings)
        loss = loss + weights.confidence * confidence_loss(confidence, slots.accept, weight=weight)
    return StepResult(
        loss,
        weight.sum() if denominator is None else denominator,
        torch.zeros(valid.shape, device=valid.device).masked_scatter(valid, slots.accept),
        torch.zeros_like(valid).masked_scatter(valid, slots.match),
        valid,
    )
