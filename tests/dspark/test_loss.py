"""The fused loss equals the textbook loss written with autograd over full logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.dspark import loss as loss_module
from stages.dspark.loss import SlotTargets, confidence_loss, position_weights, slot_loss


def _problem(seed, slots=37, states=11, hidden=16, rank=4, vocab=60, draft=23):
    g = torch.Generator().manual_seed(seed)
    full = torch.randn(states, vocab, generator=g) * 3
    draft_vocab = torch.randperm(vocab, generator=g)[:draft].sort().values
    draft_id = torch.full((vocab,), -1)
    draft_id[draft_vocab] = torch.arange(draft)
    return {
        "h": torch.randn(slots, hidden, generator=g),
        "m": torch.randn(slots, rank, generator=g),
        "head": torch.randn(draft, hidden, generator=g),
        "w2": torch.randn(draft, rank, generator=g),
        "weight": torch.rand(slots, generator=g),
        "full": full,
        "draft_vocab": draft_vocab,
        "targets": SlotTargets(
            full[:, draft_vocab],
            full.logsumexp(-1),
            torch.randint(states, (slots,), generator=g),
            draft_id[torch.randint(vocab, (slots,), generator=g)],
        ),
    }


def _reference(problem, ce_weight, tv_weight):
    """Over the whole vocabulary: the draft has probability zero outside its own."""
    h, m, w2 = (problem[k].clone().requires_grad_() for k in ("h", "m", "w2"))
    targets = problem["targets"]
    z = h @ problem["head"].T + m @ w2.T
    p = torch.zeros(len(h), problem["full"].shape[1]).index_add(
        1, problem["draft_vocab"], z.softmax(-1)
    )
    q = problem["full"].softmax(-1)[targets.index]
    tv = (p - q).abs().sum(-1)
    known = targets.draft_id >= 0
    ce = F.cross_entropy(z, targets.draft_id.clamp(min=0), reduction="none") * known
    total = (problem["weight"] * (ce_weight * ce + tv_weight * tv)).sum()
    total.backward()
    return total.detach(), ce, tv, torch.minimum(p, q).sum(-1), (h.grad, m.grad, w2.grad)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), ce=st.floats(0, 2), tv=st.floats(0, 2), chunk=st.integers(1, 64)
)
def test_fused_loss_and_gradients_equal_autograd_over_full_logits(seed, ce, tv, chunk):
    problem = _problem(seed)
    total, ce_ref, tv_ref, accept_ref, grads = _reference(problem, ce, tv)
    leaves = [problem[k].clone().requires_grad_() for k in ("h", "m", "w2")]
    before, loss_module.CHUNK_SLOTS = loss_module.CHUNK_SLOTS, chunk
    try:
        result = slot_loss(
            leaves[0],
            leaves[1],
            head=problem["head"],
            markov_w2=leaves[2],
            targets=problem["targets"],
            weight=problem["weight"],
            ce_weight=ce,
            tv_weight=tv,
        )
    finally:
        loss_module.CHUNK_SLOTS = before
    result.loss.backward()
    torch.testing.assert_close(result.loss.detach(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.ce, ce_ref.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.tv, tv_ref.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.accept, accept_ref.detach(), rtol=1e-5, atol=1e-5)
    for leaf, reference in zip(leaves, grads, strict=True):
        torch.testing.assert_close(leaf.grad, reference, rtol=1e-4, atol=1e-5)


def test_a_token_outside_the_draft_vocabulary_never_matches():
    problem = _problem(3)
    result = slot_loss(
        problem["h"],
        problem["m"],
        head=problem["head"],
        markov_w2=problem["w2"],
        targets=problem["targets"],
        weight=problem["weight"],
        ce_weight=1.0,
        tv_weight=1.0,
    )
    assert not result.match[problem["targets"].draft_id < 0].any()


def test_confidence_loss_is_weighted_binary_cross_entropy():
    logits, accept, weight = (
        torch.tensor([0.3, -2.0]),
        torch.tensor([0.25, 0.9]),
        torch.tensor([1.0, 0.5]),
    )
    p = logits.sigmoid()
    expected = -(weight * (accept * p.log() + (1 - accept) * (1 - p).log())).sum()
    torch.testing.assert_close(confidence_loss(logits, accept, weight=weight), expected)


def test_position_weights_decay_and_vanish_where_invalid():
    valid = torch.tensor([[True, True, False]])
    assert position_weights(valid, decay=0.5).tolist() == [[1.0, 0.5, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_bfloat16_products_stay_close_to_float32(dtype):
    problem = _problem(5)

    def run(cast):
        return slot_loss(
            problem["h"].to(cast),
            problem["m"].to(cast),
            head=problem["head"],
            markov_w2=problem["w2"],
            targets=problem["targets"],
            weight=problem["weight"],
            ce_weight=0.1,
            tv_weight=0.9,
        ).loss

    torch.testing.assert_close(run(dtype), run(torch.float32), rtol=2e-2, atol=0)
