"""Our drafter and speculators' DSparkDraftModel agree in float32 on the same weights and blocks."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.dspark.config import DrafterConfig
from stages.dspark.draft import draft_greedy
from stages.dspark.model import Drafter
from stages.dspark.rope import Rope
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
    rope=Rope(theta=50_000.0),
    max_position_embeddings=256,
    block_size=5,
    mask_token_id=4,
    layer_ids=(1, 3, 5),
    sliding_window=None,
    sliding_layers=(),
    markov_head="vanilla",
    markov_rank=16,
    confidence_head=True,
    confidence_head_with_markov=True,
    target_architecture="LlamaForCausalLM",
)


VARIANTS = {
    "default": {},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "no Markov head": {
        "markov_head": "none",
        "markov_rank": 0,
        "confidence_head_with_markov": False,
    },
    "confidence without Markov": {"markov_head": "rnn", "confidence_head_with_markov": False},
    "no confidence": {"confidence_head": False, "confidence_head_with_markov": False},
    "full vocabulary": {"draft_vocab_size": 300},
    "six layers, one head group, long block": {
        "num_layers": 6,
        "num_key_value_heads": 1,
        "block_size": 16,
    },
    "one layer, short block": {"num_layers": 1, "num_key_value_heads": 4, "block_size": 4},
    "a sliding layer": {"sliding_window": 6, "sliding_layers": (1,)},
    "linear": {"rope": Rope(theta=1e4, type="linear", factor=4.0)},
    "llama3": {
        "rope": Rope(
            theta=1e4,
            type="llama3",
            factor=8.0,
            original_max_position_embeddings=32,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )
    },
    "yarn": {
        "rope": Rope(
            theta=1e4,
            type="yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            attention_factor=1.2,
            beta_fast=32.0,
            beta_slow=1.0,
        )
    },
}


def _problem(config):
    g = torch.Generator().manual_seed(0)
    H, V, T = config.hidden_size, config.vocab_size, 40
    vocab = choose_vocab(
        torch.randint(9, (V,), generator=g), size=config.draft_vocab_size, always=[]
    )
    drafter = Drafter(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=g) * 0.1 + name.endswith("norm.weight")
            )
    lm_head, last = torch.randn(V, H, generator=g) * 0.3, torch.randn(1, T, H, generator=g)
    norm = torch.rand(H, generator=g) + 0.5
    normed = torch.nn.functional.rms_norm(last, (H,), norm, config.rms_norm_eps)
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
        torch.tensor([[10, 15, 18, 23]]),
    )
    frozen = Frozen(
        torch.randn(V, H, generator=g),
        lm_head[vocab],
        norm,
        config.rms_norm_eps,
        draft_ids(vocab, vocab_size=V),
    )
    return drafter, batch, frozen, vocab


@pytest.fixture
def problem(request):
    return _problem(replace(CONFIG, **VARIANTS[getattr(request, "param", "default")]))


def _maps(config, vocab):
    """t2d and d2t, which the peer has for a reduced vocabulary alone."""
    if not config.reduced_vocab:
        return {}
    return {"t2d": membership(vocab, vocab_size=config.vocab_size), "d2t": offsets(vocab)}


def _peer(problem, monkeypatch):
    """Their model with our weights, and with the anchors of our batch."""
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    drafter, batch, frozen, vocab = problem
    body = {k: v for k, v in drafter.config.to_json().items() if k != "architectures"}
    config = DSparkSpeculatorConfig(**body)
    config.transformer_layer_config._attn_implementation = "eager"
    model = DSparkDraftModel(config=config).float()
    tensors = {name: value.detach().clone() for name, value in drafter.named_parameters()}
    tensors |= _frozen_of_peer(frozen) | _maps(drafter.config, vocab)
    result = model.load_state_dict(tensors, strict=False)
    assert not result.unexpected_keys
    assert not result.missing_keys
    _fix_anchors(batch, monkeypatch)
    return model


def _frozen_of_peer(frozen):
    return {
        "embed_tokens.weight": frozen.embedding,
        "lm_head.weight": frozen.head,
        "verifier_lm_head.weight": frozen.head,
        "verifier_norm.weight": frozen.norm,
    }


def _fix_anchors(batch, monkeypatch):
    from speculators.models.dflash import core

    anchors = batch.anchors[0]
    monkeypatch.setattr(  # fake the draw of anchors alone
        core,
        "select_anchors",
        lambda *_, **__: (anchors, torch.ones_like(anchors, dtype=torch.bool)),
    )


def _peer_outputs(model, batch):
    """Hidden states [M*N, H], logits [M, N, Vd] and confidences [M, N] or None of their model."""
    block = model.block_size
    hidden, base, *_ = model._backbone_forward(
        batch.planes,
        batch.input_ids,
        batch.loss_mask,
        batch.last,
        torch.zeros_like(batch.input_ids),
        max_anchors=4,
    )
    hidden = hidden.view(4, block, -1)
    logits, previous = base.view(4, block, -1), batch.input_ids[0][_positions(batch, block)]
    embeddings = hidden[..., :0]
    if model.markov_head is not None:
        embeddings = model.markov_head.prev_embeddings(previous)
        logits = logits + model.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=hidden, prev_emb=embeddings
        )
    if model.confidence_head is None:
        return logits, None
    with_markov = model.config.confidence_head_with_markov
    features = torch.cat([hidden, embeddings], -1) if with_markov else hidden
    return logits, model.confidence_head(features)


def _our_outputs(drafter, batch, frozen):
    config = drafter.config
    states = drafter(
        batch.planes,
        batch.anchors,
        frozen.embedding[batch.input_ids.gather(1, batch.anchors)],
        frozen.embedding[config.mask_token_id],
    )
    previous = batch.input_ids[0][_positions(batch, config.block_size)].unsqueeze(0)
    everywhere = torch.ones_like(previous, dtype=torch.bool)
    embeddings, latents = drafter.markov(previous, states, everywhere)
    flat = states.flatten(0, 2)
    logits = (flat @ frozen.head.T + latents @ drafter.markov_w2.T).view(4, config.block_size, -1)
    if drafter.confidence_head is None:
        return logits, None
    return logits, drafter.confidence_head(flat, embeddings).view(4, config.block_size)


def _positions(batch, block):
    return batch.anchors[0].unsqueeze(-1) + torch.arange(block)


def _assert_same_outputs(ours, theirs):
    (logits, confidences), (their_logits, their_confidences) = ours, theirs
    assert float((logits - their_logits).norm() / their_logits.norm()) < 1e-4
    assert (confidences is None) == (their_confidences is None)
    if confidences is not None:
        assert float((confidences - their_confidences).abs().max()) < 1e-5


LOSSES = {
    "tv": ({"tv": 1.0}, "fixed-exp-decay", 1.0),
    "ce": ({"ce": 1.0}, "fixed-exp-decay", 1.0),
    "kl": ({"kl_div": 1.0}, "fixed-exp-decay", 1.0),
    "all": ({"ce": 0.1, "tv": 0.9, "kl_div": 0.4}, "fixed-exp-decay", 0.5),
    # its weights of another term come from that term and not from the draft's probabilities
    "dpace": ({"ce": 1.0}, "dpace", 0.0),
}


@pytest.mark.parametrize(
    ("loss", "problem"),
    [(loss, "default") for loss in LOSSES] + [("all", variant) for variant in VARIANTS],
    indirect=["problem"],
)
def test_loss_and_gradients_equal_the_peers(loss, problem, monkeypatch):
    """In its conventions: half the L1 distance, exp(-k/gamma), normalised by the mask."""
    from speculators.losses import resolve_loss_config

    terms, weighting, confidence = LOSSES[loss]
    drafter, batch, frozen, _ = problem
    model = _peer(problem, monkeypatch)
    _, their_loss, _ = model(
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
    their_loss.backward()
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
    assert float(ours.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-6)
    assert bool(result.valid.all())
    own = dict(drafter.named_parameters())
    compared = 0
    for key, parameter in model.named_parameters():
        if key in own and parameter.grad is not None:
            reference = parameter.grad
            error = (own[key].grad - reference).norm() / reference.norm().clamp(min=1e-12)
            assert float(error) < 1e-5, key
            compared += 1
    assert compared == len(own)


@pytest.mark.parametrize("problem", VARIANTS, indirect=True)
@torch.no_grad()
def test_logits_and_confidences_equal_the_peers(problem, monkeypatch):
    drafter, batch, frozen, _ = problem
    model = _peer(problem, monkeypatch)
    _assert_same_outputs(_our_outputs(drafter, batch, frozen), _peer_outputs(model, batch))


@pytest.mark.parametrize("problem", VARIANTS, indirect=True)
@torch.no_grad()
def test_the_peer_loads_what_we_save_and_we_load_what_it_saves(problem, monkeypatch, tmp_path):
    from speculators.models.dspark import DSparkDraftModel

    drafter, batch, frozen, vocab = problem
    ours = _our_outputs(drafter, batch, frozen)
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(drafter.config.to_json()))
    tensors = drafter.packaged() | _maps(drafter.config, vocab)
    if drafter.config.reduced_vocab:
        tensors["lm_head.weight"] = frozen.head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = DSparkDraftModel.from_pretrained(folder, dtype=torch.float32)
    theirs.config.transformer_layer_config._attn_implementation = "eager"
    # the target's tensors, which it would read from the verifier
    theirs.load_state_dict(_frozen_of_peer(frozen), strict=False)
    _fix_anchors(batch, monkeypatch)
    monkeypatch.setattr(theirs, "_create_mask_fn", _eager_mask())
    _assert_same_outputs(ours, _peer_outputs(theirs, batch))

    theirs.save_pretrained(tmp_path / "theirs")
    body = json.loads((tmp_path / "theirs/config.json").read_text())
    saved = load_file(tmp_path / "theirs/model.safetensors")
    config = DrafterConfig.from_json(body)
    assert config == drafter.config
    back = Drafter(config)
    back.load_packaged(saved)
    for (name, value), mine in zip(back.named_parameters(), drafter.parameters(), strict=True):
        assert torch.equal(value, mine), name


def _eager_mask():
    from speculators.models.attention import create_float_mask

    return create_float_mask


@pytest.mark.parametrize("problem", VARIANTS, indirect=True)
@torch.no_grad()
def test_a_greedy_draft_is_what_the_peers_block_bias_makes_of_its_own_tokens(problem):
    """Step by step equals teacher-forced: fed our draft, their head gives the same logits."""
    from speculators.models.dspark.model_definitions import MarkovHead

    drafter, batch, frozen, vocab = problem
    config = drafter.config
    draft = draft_greedy(
        drafter,
        embedding=frozen.embedding,
        lm_head=frozen.head,
        draft_vocab=vocab,
        planes=batch.planes[0, :20],
        anchor=7,
    )
    states = drafter(
        batch.planes[:, :20],
        torch.tensor([[20]]),
        frozen.embedding[7].view(1, 1, -1),
        frozen.embedding[config.mask_token_id],
    )[0]
    logits = states @ frozen.head.T
    if drafter.markov_head is not None:
        head = MarkovHead(
            verifier_vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            markov_rank=config.markov_rank,
            hidden_size=config.hidden_size,
            head_type=config.markov_head,
        )
        head.load_state_dict(drafter.markov_head.state_dict())
        previous = torch.tensor([[7, *draft.tokens[:-1].tolist()]])
        logits = logits + head.block_bias(prev_token_ids=previous, hidden_states=states)
    torch.testing.assert_close(draft.logits, logits[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(draft.tokens, vocab[logits[0].argmax(-1)])
    assert (draft.confidences == 1).all() == (not config.confidence_head)
