"""Our drafter and speculators' DSparkDraftModel agree in float32 on the same weights and blocks."""

import json
import math

import pytest
import torch

from stages.dspark.config import DrafterConfig
from stages.dspark.loss import position_weights
from stages.dspark.model import Drafter
from stages.dspark.slots import slot_table
from stages.dspark.step import Batch, Frozen, LossWeights, forward_batch
from stages.dspark.vocab import choose_vocab, draft_ids, membership, offsets

pytestmark = pytest.mark.peer

CONFIG = DrafterConfig(
    hidden_size=64,
    vocab_size=300,
    draft_vocab_size=120,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    rms_norm_eps=1e-5,
    rope_theta=50_000.0,
    max_position_embeddings=256,
    block_size=5,
    mask_token_id=4,
    layer_ids=(1, 3, 5),
    markov_rank=16,
    confidence_head_with_markov=True,
    target_architecture="LlamaForCausalLM",
)


@pytest.fixture
def problem():
    g = torch.Generator().manual_seed(0)
    H, V, T = CONFIG.hidden_size, CONFIG.vocab_size, 40
    vocab = choose_vocab(torch.randint(9, (V,), generator=g), size=120, always=[])
    drafter = Drafter(CONFIG)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=g) * 0.1 + (parameter.dim() == 1)
            )
    lm_head, last = torch.randn(V, H, generator=g) * 0.3, torch.randn(1, T, H, generator=g)
    norm = torch.rand(H, generator=g) + 0.5
    normed = torch.nn.functional.rms_norm(last, (H,), norm, CONFIG.rms_norm_eps)
    loss_mask = torch.zeros(1, T, dtype=torch.bool)
    loss_mask[:, 10:] = True
    # the peer renormalises the target over the draft vocabulary: give our loss the same log-sum-exp
    lse = (normed @ lm_head[vocab].T).logsumexp(-1)
    batch = Batch(
        torch.randn(1, T, 3 * H, generator=g),
        last,
        torch.randint(V, (1, T), generator=g),
        loss_mask,
        lse,
        torch.tensor([[10, 17, 22, 30]]),
    )
    frozen = Frozen(
        torch.randn(V, H, generator=g),
        lm_head[vocab],
        norm,
        CONFIG.rms_norm_eps,
        draft_ids(vocab, vocab_size=V),
    )
    return drafter, batch, frozen, vocab


def _peer(problem, monkeypatch):
    from speculators.models.dflash import core
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    drafter, batch, frozen, vocab = problem
    body = {k: v for k, v in CONFIG.to_json().items() if k != "architectures"}
    config = DSparkSpeculatorConfig(**body)
    config.transformer_layer_config._attn_implementation = "eager"
    model = DSparkDraftModel(config=config).float()
    model.load_vocab_mappings(membership(vocab, vocab_size=CONFIG.vocab_size), offsets(vocab))
    tensors = {name: value.detach().clone() for name, value in drafter.named_parameters()}
    tensors |= {
        "embed_tokens.weight": frozen.embedding,
        "lm_head.weight": frozen.head,
        "verifier_lm_head.weight": frozen.head,
        "verifier_norm.weight": frozen.norm,
    }
    result = model.load_state_dict(tensors, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"d2t", "t2d"}
    anchors = batch.anchors[0]
    monkeypatch.setattr(  # fake the draw of anchors alone
        core,
        "select_anchors",
        lambda *_, **__: (anchors, torch.ones_like(anchors, dtype=torch.bool)),
    )
    return model


LOSSES = {
    "tv": ({"tv": 1.0}, "fixed-exp-decay", 1.0),
    "ce": ({"ce": 1.0}, "fixed-exp-decay", 1.0),
    "kl": ({"kl_div": 1.0}, "fixed-exp-decay", 1.0),
    "all": ({"ce": 0.1, "tv": 0.9, "kl_div": 0.4}, "fixed-exp-decay", 0.5),
    # its weights of another term come from that term and not from the draft's probabilities
    "dpace": ({"ce": 1.0}, "dpace", 0.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_equal_the_peers(name, problem, monkeypatch):
    """In its conventions: half the L1 distance, exp(-k/gamma), normalised by the mask."""
    from speculators.losses import resolve_loss_config

    terms, weighting, confidence = LOSSES[name]
    drafter, batch, frozen, _ = problem
    model = _peer(problem, monkeypatch)
    _, loss, _ = model(
        hidden_states=batch.planes,
        input_ids=batch.input_ids,
        loss_mask=batch.loss_mask,
        verifier_last_hidden_states=batch.last,
        document_ids=torch.zeros_like(batch.input_ids),
        loss_config=resolve_loss_config(json.dumps(terms), "eager"),
        tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0],
        gamma=4.0,
        max_anchors=4,
        confidence_head_alpha=confidence,
        per_position_loss_weight=weighting,
        dpace_alpha=0.3,
    )
    loss.backward()
    result = forward_batch(
        drafter,
        batch,
        frozen,
        weights=LossWeights(
            ce=terms.get("ce", 0.0),
            tv=terms.get("tv", 0.0) / 2,
            kl=terms.get("kl_div", 0.0),
            confidence=confidence,
            ce_label="target_argmax",
            position_weighting="dpace" if weighting == "dpace" else "decay",
            position_decay=math.exp(-1 / 4.0),
            dpace_smoothing=0.3,
        ),
    )
    ours = result.loss / result.valid.sum()
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    own = dict(drafter.named_parameters())
    compared = 0
    for key, parameter in model.named_parameters():
        if key in own and parameter.grad is not None:
            reference = parameter.grad
            error = (own[key].grad - reference).norm() / reference.norm().clamp(min=1e-12)
            assert float(error) < 1e-5, key
            compared += 1
    assert compared == len(own)


@torch.no_grad()
def test_logits_and_confidences_equal_the_peers(problem, monkeypatch):
    drafter, batch, frozen, _ = problem
    model = _peer(problem, monkeypatch)
    hidden, base, *_ = model._backbone_forward(
        batch.planes,
        batch.input_ids,
        batch.loss_mask,
        batch.last,
        torch.zeros_like(batch.input_ids),
        max_anchors=4,
    )
    table = slot_table(batch.anchors, batch.loss_mask, block_size=CONFIG.block_size)
    assert bool(table.valid.all())
    previous = batch.input_ids[0][table.position[0]]
    states = drafter(
        batch.planes,
        batch.anchors,
        frozen.embedding[batch.input_ids.gather(1, batch.anchors)],
        frozen.embedding[CONFIG.mask_token_id],
    )[0]
    markov = drafter.markov_embedding(previous)
    ours = states @ frozen.head.T + drafter.markov_head.markov_w2(markov)
    peer_markov = model.markov_head.prev_embeddings(previous)
    theirs = base.view(ours.shape) + model.markov_head.block_bias(
        prev_token_ids=previous, hidden_states=hidden.view(states.shape), prev_emb=peer_markov
    )
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
    features = torch.cat([hidden.view(states.shape), peer_markov], -1)
    confidence = model.confidence_head(features).view(previous.shape)
    assert float((drafter.confidence_logits(states, markov) - confidence).abs().max()) < 1e-5
    assert float(position_weights(table.valid, decay=1.0).sum()) == table.valid.numel()
