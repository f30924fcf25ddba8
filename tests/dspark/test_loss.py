"""The fused loss equals the textbook loss written with autograd over full logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.dspark import loss as loss_module
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

DEFAULT = TermWeights(ce=0.1, tv=0.9, kl=0.0)


def _problem(seed, slots=37, states=11, hidden=16, rank=4, vocab=60, draft=23):
    g = torch.Generator().manual_seed(seed)
    target_states = torch.randn(states, hidden, generator=g)
    head = torch.randn(vocab, hidden, generator=g) * 0.75
    full = target_states @ head.T
    draft_vocab = torch.randperm(vocab, generator=g)[:draft].sort().values
    draft_id = torch.full((vocab,), -1)
    draft_id[draft_vocab] = torch.arange(draft)
    return {
        "h": torch.randn(slots, hidden, generator=g),
        "m": torch.randn(slots, rank, generator=g),
        "head": head[draft_vocab],
        "w2": torch.randn(draft, rank, generator=g),
        "weight": torch.rand(slots, generator=g),
        "full": full,
        "draft_vocab": draft_vocab,
        "targets": SlotTargets(
            target_states,
            full.logsumexp(-1),
            torch.randint(states, (slots,), generator=g),
            draft_id[torch.randint(vocab, (slots,), generator=g)],
            draft_id[torch.randint(vocab, (slots,), generator=g)],
        ),
    }


def _reference(problem, terms):
    """In float64 over the whole vocabulary: the draft has probability zero outside its own."""
    h, m, w2 = (problem[k].double().requires_grad_() for k in ("h", "m", "w2"))
    targets = problem["targets"]
    z = h @ problem["head"].double().T + m @ w2.T
    p = torch.zeros(len(h), problem["full"].shape[1], dtype=torch.float64).index_add(
        1, problem["draft_vocab"], z.softmax(-1)
    )
    q = problem["full"].double().softmax(-1)[targets.index]
    tv = (p - q).abs().sum(-1)
    known = targets.label >= 0
    ce = F.cross_entropy(z, targets.label.clamp(min=0), reduction="none") * known
    inside = q[:, problem["draft_vocab"]]
    kl = (inside * (inside.log() - z.log_softmax(-1))).sum(-1)
    total = (problem["weight"] * (terms.ce * ce + terms.tv * tv + terms.kl * kl)).sum()
    total.backward()
    slots = {"ce": ce, "tv": tv, "kl": kl, "accept": torch.minimum(p, q).sum(-1)}
    return (
        total.detach(),
        {name: value.detach() for name, value in slots.items()},
        (h.grad, m.grad, w2.grad),
    )


def _close(found, expected, tolerance):
    """Relative to the largest value."""
    error = (found.double() - expected).abs().max()
    assert float(error) <= tolerance * max(float(expected.abs().max()), 1.0)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    ce=st.floats(0, 2),
    tv=st.floats(0, 2),
    kl=st.sampled_from([0.0, 0.3, 2.0]),
    chunk=st.integers(1, 64),
)
def test_fused_loss_and_gradients_equal_autograd_over_full_logits(seed, ce, tv, kl, chunk):
    problem, terms = _problem(seed), TermWeights(ce=ce, tv=tv, kl=kl)
    total, slots, grads = _reference(problem, terms)
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
            terms=terms,
        )
    finally:
        loss_module.CHUNK_SLOTS = before
    result.loss.backward()
    _close(result.loss.detach(), total, 1e-5)
    for name, expected in slots.items():
        if name != "kl" or kl:
            _close(getattr(result, name), expected, 1e-5)
    for leaf, reference in zip(leaves, grads, strict=True):
        _close(leaf.grad, reference, 1e-5)


def test_a_token_outside_the_draft_vocabulary_never_matches():
    problem = _problem(3)
    result = slot_loss(
        problem["h"],
        problem["m"],
        head=problem["head"],
        markov_w2=problem["w2"],
        targets=problem["targets"],
        weight=problem["weight"],
        terms=DEFAULT,
    )
    assert not result.match[problem["targets"].draft_id < 0].any()


def test_the_label_moves_the_cross_entropy_and_never_the_match():
    problem = _problem(4)
    targets = problem["targets"]

    def run(label):
        return slot_loss(
            problem["h"],
            problem["m"],
            head=problem["head"],
            markov_w2=problem["w2"],
            targets=targets._replace(label=label),
            weight=problem["weight"],
            terms=DEFAULT,
        )

    first, second = (
        run(targets.label),
        run(best_draftable(targets.states, problem["head"])[targets.index]),
    )
    assert torch.equal(first.match, second.match)
    assert not torch.equal(first.ce, second.ce)


def test_the_probability_of_a_label_is_the_softmax_of_the_biased_logits():
    problem = _problem(6)
    label = problem["targets"].label
    z = problem["h"].double() @ problem["head"].double().T
    z = z + problem["m"].double() @ problem["w2"].double().T
    expected = z.softmax(-1).gather(-1, label.clamp(min=0)[:, None])[:, 0] * (label >= 0)
    found = label_probability(
        problem["h"], problem["m"], head=problem["head"], markov_w2=problem["w2"], label=label
    )
    _close(found, expected, 1e-5)


@given(st.lists(st.floats(0.01, 1), min_size=4, max_size=4), st.integers(1, 4))
def test_dpace_weighs_a_slot_by_the_gradient_of_the_expected_accepted_drafts(rates, length):
    """Without smoothing: d/d log(p_k) of sum over j of p_0 * ... * p_j, by autograd."""
    logs = torch.tensor(rates, dtype=torch.float64).log().requires_grad_()
    valid = torch.arange(4) < length
    sum(logs[: j + 1].sum().exp() for j in range(length)).backward()
    found = dpace_weights(torch.tensor(rates), valid, smoothing=0.0)
    _close(found, logs.grad, 1e-5)
    assert not found[~valid].any()
    ignored = dpace_weights(torch.tensor(rates), valid, smoothing=1.0)
    assert ignored.tolist() == [max(length - k, 0) for k in range(4)]


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
            terms=DEFAULT._replace(kl=0.5),
        ).loss

    torch.testing.assert_close(run(dtype), run(torch.float32), rtol=2e-2, atol=0)
