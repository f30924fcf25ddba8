"""The DSpark loss in closed form: full logits are never kept, gradients are made going forward.

Shapes: P supervised slots, U distinct target states among them, H hidden size, R Markov rank,
Vd draft vocabulary.

For slot i with logits z = head @ h + W2 @ m, draft p = softmax(z), target q (its full-vocabulary
probabilities restricted to the draft vocabulary, so they sum to at most one) and label y:
  CE      -log p[y]                              0 where y is outside the draft vocabulary
  TV      |p - q|_1                              L1, as the DSpark paper and DeepSpec; the mass of q
                                                 outside the draft vocabulary adds a constant
  KL      sum q * log(q / p)                     over the draft vocabulary; outside it p is zero and
                                                 the true divergence infinite, so that part is left
                                                 out: equal to KL(q | p) for a full vocabulary, at
                                                 least mass * log(mass) for a reduced one
  accept  sum min(p, q)                          the label of the confidence head, no gradient
with dCE/dz = p - onehot(y), dTV/dz = p * (s - <p, s>), s = sign(p - q), and
dKL/dz = mass * p - q, mass = sum q. y is the next token, or the target's most probable token of the
draft vocabulary (speculators' choice). A chunk of slots at a time goes through
[h, m] @ [head, W2]^T and back, so memory is chunk * Vd. Softmax and loss are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_SLOTS = 256
CHUNK_LOGITS = 2**21  # fewer slots where Vd > 8192: 8 MB in float32, which stays in cache


class SlotTargets(NamedTuple):
    """What the target says about the supervised slots."""

    states: Tensor  # [U, H] the target's, after its final norm; head gives their logits
    log_sum_exp: Tensor  # float32 [U], over the full vocabulary
    index: Tensor  # int64 [P]: the state that judges slot i
    draft_id: Tensor  # int64 [P]: the next token's draft id, -1 outside the draft vocabulary
    label: Tensor  # int64 [P]: the cross-entropy's token as a draft id, -1 outside


class TermWeights(NamedTuple):
    """What the terms of the loss count."""

    ce: float
    tv: float
    kl: float


class SlotLoss(NamedTuple):
    """Per slot, float32 [P]; `loss` carries the gradient of its weighted terms."""

    loss: Tensor  # scalar: sum of weight * (terms.ce * ce + terms.tv * tv + terms.kl * kl)
    ce: Tensor
    tv: Tensor
    kl: Tensor  # zero where terms.kl is: it is not computed then
    accept: Tensor  # overlap of draft and target distribution
    match: Tensor  # bool [P]: the draft's argmax is the next token


def slot_loss(
    states: Tensor,
    markov: Tensor,
    *,
    head: Tensor,
    markov_w2: Tensor,
    targets: SlotTargets,
    weight: Tensor,
    terms: TermWeights,
) -> SlotLoss:
    """states: [P, H]; markov: [P, R]; head: [Vd, H] frozen; markov_w2: [Vd, R]; weight: [P].

    Gradients flow to states, markov and markov_w2. Products run in the dtype of `states`. The
    target's logits are made a chunk at a time, for its distinct states: in the order of blocks few
    of them come up in two chunks.
    """
    return SlotLoss(
        *_SlotLoss.apply(states, markov, head, markov_w2, targets, weight.float(), terms)
    )


class _SlotLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        markov: Tensor,
        head: Tensor,
        markov_w2: Tensor,
        targets: SlotTargets,
        weight: Tensor,
        terms: TermWeights,
    ) -> tuple[Tensor, ...]:
        dtype, hidden = states.dtype, states.shape[1]
        features = torch.cat([states, markov.to(dtype)], -1)
        table = torch.cat([head.to(dtype), markov_w2.to(dtype)], -1)  # [Vd, H+R]
        ce, tv, kl, accept = (torch.zeros(len(states), device=states.device) for _ in range(4))
        match = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        needs_grad = any(ctx.needs_input_grad)
        grad_features = torch.empty_like(features if needs_grad else features[:0])
        grad_w2 = torch.zeros_like(markov_w2, dtype=torch.float32)
        # All chunks go through the same memory: fresh pages cost as much as the arithmetic on them.
        size = min(_chunk_slots(len(table)), len(states))
        products = torch.empty(size, len(table), dtype=dtype, device=states.device)
        buffers = torch.empty(2, size, len(table), device=states.device)
        for start in range(0, len(states), max(size, 1)):
            rows = slice(start, start + size)
            index, known = targets.index[rows], targets.label[rows] >= 0
            label = targets.label[rows].clamp(min=0).unsqueeze(-1)
            product, z, log_q = (part[: len(index)] for part in (products, *buffers))
            torch.mm(features[rows], table.T, out=product)
            z.copy_(product)
            largest = z.amax(-1, keepdim=True)
            match[rows] = _is_first_largest(z, largest, targets.draft_id[rows])
            ce[rows] = (largest - z.gather(-1, label)).squeeze(-1)
            z.sub_(largest)
            used, judge = index.unique(return_inverse=True)
            judges = targets.states[used].to(dtype)
            torch.mm(judges, table[:, :hidden].T, out=product[: len(used)])
            log_q.copy_(product[judge]).sub_(targets.log_sum_exp[index].unsqueeze(-1))
            excess = log_q - z if terms.kl else None  # log(q / p) less log(total)
            p, q = z.exp_(), log_q.exp_()
            total, mass = p.sum(-1, keepdim=True), q.sum(-1)
            log_total = total.log().squeeze(-1)
            ce[rows] = (ce[rows] + log_total) * known
            if excess is not None:
                kl[rows] = torch.linalg.vecdot(q, excess) + mass * log_total
            difference = torch.sub(p.div_(total), q, out=q)
            distance = torch.linalg.vector_norm(difference, 1, -1)  # over the draft vocabulary
            tv[rows] = distance + (1.0 - mass)
            accept[rows] = 0.5 * (1.0 + mass - distance)  # sum min(p, q)
            if needs_grad:
                # dz = p*s * tv + p * (ce*known - tv*<p,s>) - ce*known*onehot + kl*(mass*p - q), all
                # times weight, where q = p - difference
                scale = weight[rows].unsqueeze(-1)
                ce_scale = terms.ce * scale * known.unsqueeze(-1)
                if excess is None:
                    p_sign = torch.copysign(p, difference, out=difference)
                else:
                    p_sign = torch.copysign(p, difference, out=excess)
                p_scale = ce_scale - terms.tv * scale * p_sign.sum(-1, keepdim=True)
                if excess is not None:
                    kl_scale = terms.kl * scale
                    p_scale += kl_scale * (mass.unsqueeze(-1) - 1.0)
                dz = p.mul_(p_scale).addcmul_(p_sign, terms.tv * scale)
                if excess is not None:
                    dz.addcmul_(difference, kl_scale)
                dz.scatter_add_(-1, label, -ce_scale)
                product.copy_(dz)
                torch.mm(product, table, out=grad_features[rows])
                grad_w2.add_(product.T @ features[rows, hidden:])
        if needs_grad:
            ctx.save_for_backward(grad_features[:, :hidden], grad_features[:, hidden:], grad_w2)
            ctx.dtypes = markov.dtype, markov_w2.dtype
        ctx.mark_non_differentiable(ce, tv, kl, accept, match)
        loss = (weight * (terms.ce * ce + terms.tv * tv + terms.kl * kl)).sum()
        return loss, ce, tv, kl, accept, match

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_markov, grad_w2 = ctx.saved_tensors
        markov_dtype, w2_dtype = ctx.dtypes
        return (
            grad_states * grad_loss.to(grad_states.dtype),
            grad_markov.to(markov_dtype) * grad_loss.to(markov_dtype),
            None,
            grad_w2.to(w2_dtype) * grad_loss.to(w2_dtype),
            None,
            None,
            None,
        )


def _chunk_slots(draft_vocab_size: int) -> int:
    return max(1, min(CHUNK_SLOTS, CHUNK_LOGITS // draft_vocab_size))


def _is_first_largest(z: Tensor, largest: Tensor, draft_id: Tensor) -> Tensor:
    """z.argmax(-1) == draft_id for z [slots, Vd], bool [slots].

    argmax takes as long as an exponential; equal logits (they occur in bfloat16) are rare, so it
    runs only over slots whose token has the largest one.
    """
    found = (z.gather(-1, draft_id.clamp(min=0).unsqueeze(-1)) == largest).squeeze(-1)
    found &= draft_id >= 0
    places = found.nonzero().squeeze(-1)
    found[places] = z[places].argmax(-1) == draft_id[places]
    return found


@torch.no_grad()
def best_draftable(states: Tensor, head: Tensor) -> Tensor:
    """int64 [U]: the draft id of the largest logit of the target's normed states [U, H]."""
    size = _chunk_slots(len(head))
    return torch.cat([(chunk @ head.T).argmax(-1) for chunk in states.split(size)])


@torch.no_grad()
def label_probability(
    states: Tensor, markov: Tensor, *, head: Tensor, markov_w2: Tensor, label: Tensor
) -> Tensor:
    """float32 [P]: the draft's probability of each slot's label, 0 where it is -1 (no draft id).

    Shapes as in slot_loss. Costs one more product with the head: position weights that depend on
    the drafts must be known before the loss makes its gradients.
    """
    features = torch.cat([states, markov.to(states.dtype)], -1)
    table = torch.cat([head.to(states.dtype), markov_w2.to(states.dtype)], -1)
    found = torch.empty(len(states), device=states.device)
    size = _chunk_slots(len(table))
    for start in range(0, len(states), size):
        rows = slice(start, start + size)
        z = (features[rows] @ table.T).float()
        chosen = z.gather(-1, label[rows].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        found[rows] = (chosen - z.logsumexp(-1)).exp() * (label[rows] >= 0)
    return found


def confidence_loss(logits: Tensor, accept: Tensor, *, weight: Tensor) -> Tensor:
    """Sum of weight * binary cross-entropy of confidence logits [P] with acceptance rates [P]."""
    label = accept.detach().clamp(0.0, 1.0)
    return (F.binary_cross_entropy_with_logits(logits, label, reduction="none") * weight).sum()


def dpace_weights(probability: Tensor, valid: Tensor, *, smoothing: float) -> Tensor:
    """float32 [..., N]: D-PACE weights of the slots of a block, 0 where invalid.

    probability: float32 [..., N] of the label under the draft. With a_k = (1 - smoothing) *
    probability_k + smoothing, slot k weighs sum over j >= k of a_0 * ... * a_j: the derivative of
    the block's expected number of accepted drafts by log a_k, so that a slot counts as far as those
    before it hold. Its denominator is the number of valid slots, as in speculators: the weights
    grow as the drafts improve.
    """
    kept = valid.float()
    smooth = ((1.0 - smoothing) * probability.float() + smoothing).masked_fill(~valid, 1.0)
    prefix = smooth.cumprod(-1) * kept
    return prefix.flip(-1).cumsum(-1).flip(-1) * kept


def position_weights(valid: Tensor, *, decay: float) -> Tensor:
    """float32 [..., N]: decay**k for valid slots, else 0; its sum is the loss's denominator."""
    slots = torch.arange(valid.shape[-1], device=valid.device)
    return valid.float() * decay**slots
