"""The drafter equals a slow reference that runs one block at a time with an explicit mask."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.dspark.acceptance import acceptance_length, expected_acceptance, leading_matches, walk
from stages.dspark.config import DrafterConfig
from stages.dspark.draft import draft_greedy
from stages.dspark.model import Drafter
from stages.dspark.rope import Rope
from stages.dspark.slots import anchor_candidates, sample_anchors, slot_table
from stages.dspark.vocab import check_d2t, choose_vocab, draft_ids, membership, offsets

CONFIG = DrafterConfig(
    hidden_size=32,
    vocab_size=80,
    draft_vocab_size=50,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_position_embeddings=128,
    block_size=4,
    mask_token_id=3,
    layer_ids=(1, 2),
    sliding_window=None,
    sliding_layers=(),
    markov_head="vanilla",
    markov_rank=6,
    confidence_head=True,
    confidence_head_with_markov=True,
    target_architecture="LlamaForCausalLM",
)


def _drafter(config=CONFIG, seed=0):
    drafter = Drafter(config)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=g) * 0.3 + (parameter.dim() == 1)
            )
    return drafter


def _norm(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rope(x, positions, share):
    """x: [tokens, heads, D]; a share of the channels turns pair by pair as complex numbers."""
    half = int(x.shape[-1] * share) // 2
    frequency = 10_000.0 ** (-torch.arange(half).double() / half)
    angle = positions.double()[:, None, None] * frequency
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :].double()], -1).float()


def _reference_block(drafter, planes, anchor, embedding, token):
    """One block: attention over an explicit list of keys, head by head."""
    weights, config = dict(drafter.named_parameters()), drafter.config
    N, D, share = config.block_size, config.head_dim, config.rope.partial_rotary_factor
    whole_context = _norm(planes[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    x = torch.stack([embedding[token], *[embedding[config.mask_token_id]] * (N - 1)])
    block_positions = torch.arange(anchor, anchor + N)
    for i in range(config.num_layers):
        first = max(anchor - config.sliding_window, 0) if i in config.sliding_layers else 0
        context = whole_context[first:]
        w = {k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"layers.{i}.")}
        normed = _norm(x, w["input_layernorm.weight"])
        keys_from = torch.cat([context, normed])
        positions = torch.cat([torch.arange(first, anchor), block_positions])
        q = _rope(
            _norm(
                (normed @ w["self_attn.q_proj.weight"].T).view(N, -1, D),
                w["self_attn.q_norm.weight"],
            ),
            block_positions,
            share,
        )
        k = _rope(
            _norm(
                (keys_from @ w["self_attn.k_proj.weight"].T).view(len(keys_from), -1, D),
                w["self_attn.k_norm.weight"],
            ),
            positions,
            share,
        )
        v = (keys_from @ w["self_attn.v_proj.weight"].T).view(len(keys_from), -1, D)
        heads = []
        for head in range(config.num_attention_heads):
            kv = head // (config.num_attention_heads // config.num_key_value_heads)
            scores = q[:, head] @ k[:, kv].T / math.sqrt(D)
            heads.append(scores.softmax(-1) @ v[:, kv])
        x = x + torch.cat(heads, -1) @ w["self_attn.o_proj.weight"].T
        normed = _norm(x, w["post_attention_layernorm.weight"])
        gate = normed @ w["mlp.gate_proj.weight"].T
        x = (
            x
            + (gate * gate.sigmoid() * (normed @ w["mlp.up_proj.weight"].T))
            @ w["mlp.down_proj.weight"].T
        )
    return _norm(x, weights["norm.weight"])


SHAPES = {
    "default": {},
    "a window": {"sliding_window": 3, "sliding_layers": (1,)},
    "partial rope": {"rope": Rope(theta=10_000.0, partial_rotary_factor=0.5)},
}


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_every_block_equals_the_reference_whatever_shares_its_batch(shape):
    drafter = _drafter(replace(CONFIG, **SHAPES[shape]))
    g = torch.Generator().manual_seed(1)
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    planes = torch.randn(2, 12, 2 * CONFIG.hidden_size, generator=g)
    tokens = torch.randint(80, (2, 12), generator=g)
    anchors = torch.tensor([[2, 5, 9], [0, 7, -1]])
    got = drafter(
        planes,
        anchors,
        embedding[tokens.gather(1, anchors.clamp(min=0))],
        embedding[CONFIG.mask_token_id],
    )
    assert got.isfinite().all()
    for b, m in itertools.product(range(2), range(3)):
        if (anchor := int(anchors[b, m])) >= 0:
            expected = _reference_block(drafter, planes[b], anchor, embedding, tokens[b, anchor])
            torch.testing.assert_close(got[b, m], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_greedy_draft_feeds_each_token_to_the_next_slots_markov_bias():
    drafter = _drafter()
    g = torch.Generator().manual_seed(2)
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    head = torch.randn(CONFIG.draft_vocab_size, CONFIG.hidden_size, generator=g)
    vocab = torch.randperm(80, generator=g)[:50].sort().values
    planes = torch.randn(6, 2 * CONFIG.hidden_size, generator=g)
    draft = draft_greedy(
        drafter, embedding=embedding, lm_head=head, draft_vocab=vocab, planes=planes, anchor=17
    )
    states = _reference_block(drafter, planes, 6, embedding, 17)
    previous = 17
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    for slot in range(CONFIG.block_size):
        logits = head @ states[slot] + w2 @ w1[previous]
        torch.testing.assert_close(draft.logits[slot], logits, rtol=1e-4, atol=1e-4)
        proj = drafter.confidence_head.proj
        confidence = (
            proj.weight[0] @ torch.cat([states[slot], w1[previous]]) + proj.bias[0]
        ).sigmoid()
        torch.testing.assert_close(draft.confidences[slot], confidence, rtol=1e-4, atol=1e-5)
        previous = int(vocab[logits.argmax()])
        assert int(draft.tokens[slot]) == previous


masks = st.lists(st.booleans(), min_size=3, max_size=40)


@given(mask=masks, block=st.integers(1, 6), seed=st.integers(0, 99), num=st.integers(1, 12))
def test_slots_supervise_exactly_the_tokens_that_the_target_produced(mask, block, seed, num):
    loss_mask = torch.tensor(mask)
    anchors = sample_anchors(loss_mask, num_anchors=num, seed=seed)
    chosen = [int(a) for a in anchors if a >= 0]
    candidates = [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]
    assert len(chosen) == min(num, len(candidates))
    assert sorted(set(chosen)) == chosen
    assert set(chosen) <= set(candidates)
    assert anchor_candidates(loss_mask).nonzero().flatten().tolist() == candidates
    table = slot_table(anchors[None], loss_mask[None], block_size=block)
    for m, p in enumerate(anchors.tolist()):
        for k in range(block):
            run = p >= 0 and all(p + j + 1 < len(mask) and mask[p + j + 1] for j in range(k + 1))
            assert bool(table.valid[0, m, k]) == run
            if run:
                assert int(table.position[0, m, k]) == p + k
                assert int(table.target[0, m, k]) == p + k + 1


@given(data=st.data())
def test_acceptance_length_is_one_plus_survival(data):
    rates = data.draw(
        st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=8)
    )
    valid = torch.ones(len(rates), 3, dtype=torch.bool)
    survival, blocks = expected_acceptance(torch.tensor(rates, dtype=torch.float64), valid)
    expected = 1 + sum(sum(math.prod(row[: k + 1]) for k in range(3)) for row in rates) / len(rates)
    assert acceptance_length(survival, blocks) == pytest.approx(expected)


def test_leading_matches_stop_at_the_first_gap():
    matches = torch.tensor([[True, True, False], [False, True, True], [True, True, True]])
    assert leading_matches(matches).tolist() == [2, 0, 3]


def test_a_walk_visits_the_anchors_that_serving_would():
    assert walk([2, 9, 9, 0, 1, 9]) == (3, 3)  # rounds at 0, 3 and 4
    assert walk([]) == (0, 0)


@given(st.lists(st.integers(0, 5), min_size=4, max_size=40), st.data())
def test_the_draft_vocabulary_holds_the_most_frequent_tokens_and_maps_back(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=1))
    vocab = choose_vocab(torch.tensor(counts), size=size, always=always)
    assert len(set(vocab.tolist())) == size
    assert set(always) <= set(vocab.tolist())
    rest = [c for i, c in enumerate(counts) if i not in vocab.tolist()]
    kept = [counts[i] for i in vocab.tolist() if i not in always]
    assert not rest or not kept or min(kept) >= max(rest)
    assert torch.equal(check_d2t(offsets(vocab), vocab_size=len(counts)), vocab)
    inverse = draft_ids(vocab, vocab_size=len(counts))
    assert torch.equal(inverse[vocab], torch.arange(size))
    assert torch.equal(inverse >= 0, membership(vocab, vocab_size=len(counts)))


@pytest.mark.parametrize("broken", [[0, 0, -2], [0, 100, 100], [-1, 0, 0]])
def test_a_map_to_repeated_or_foreign_ids_is_refused(broken):
    with pytest.raises(ValueError, match="d2t does not map"):
        check_d2t(torch.tensor(broken), vocab_size=50)


@given(data=st.data())
def test_the_config_survives_the_packaged_form(data):
    head = data.draw(st.sampled_from(["vanilla", "gated", "rnn", "none"]))
    confidence = data.draw(st.booleans())
    layers = data.draw(st.integers(1, 6))
    sliding = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1)))))
    config = replace(
        CONFIG,
        num_layers=layers,
        block_size=data.draw(st.integers(4, 16)),
        draft_vocab_size=data.draw(st.sampled_from([50, CONFIG.vocab_size])),
        sliding_layers=sliding,
        sliding_window=data.draw(st.integers(1, 99)) if sliding else None,
        markov_head=head,
        markov_rank=0 if head == "none" else 6,
        confidence_head=confidence,
        confidence_head_with_markov=confidence and head != "none" and data.draw(st.booleans()),
    )
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_another_layout_and_impossible_shapes_are_refused():
    body = CONFIG.to_json()
    del body["sample_from_anchor"]
    with pytest.raises(ValueError, match="sample_from_anchor"):
        DrafterConfig.from_json(body)
    with pytest.raises(ValueError, match=r"layers of the drafter, 0\.\.1"):
        replace(CONFIG, sliding_window=4, sliding_layers=(2,))
    with pytest.raises(ValueError, match="with window None"):
        replace(CONFIG, sliding_layers=(1,))
    with pytest.raises(ValueError, match="even and not empty, found 1"):
        replace(CONFIG, rope=Rope(theta=1e4, partial_rotary_factor=0.125))


def test_a_checkpoint_of_another_shape_is_refused_with_both_shapes():
    tensors = {name: value.detach() for name, value in _drafter().named_parameters()}
    tensors["norm.weight"] = torch.ones(7)
    del tensors["fc.weight"]
    with pytest.raises(
        ValueError,
        match=r"fc.weight: expected \(32, 64\), found nothing; norm.weight: .* found \(7,\)",
    ):
        _drafter().load_packaged(tensors)


@torch.no_grad()
def test_the_package_of_a_conditioned_drafter_drafts_the_same():
    trained, served = _drafter(), Drafter(CONFIG)
    g = torch.Generator().manual_seed(4)
    trained.condition(torch.rand(2 * CONFIG.hidden_size, generator=g) * 50)
    served.load_packaged(trained.packaged())
    planes = torch.randn(1, 9, 2 * CONFIG.hidden_size, generator=g)
    embeddings = torch.randn(2, CONFIG.hidden_size, generator=g)
    inputs = planes, torch.tensor([[4]]), embeddings[:1, None], embeddings[1]
    torch.testing.assert_close(trained(*inputs), served(*inputs), rtol=1e-5, atol=1e-5)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["vanilla", "gated", "rnn"]))
def test_initialisation_depends_on_the_seed_alone(seed, head):
    config = replace(CONFIG, markov_head=head)
    first, second = Drafter(config), Drafter(config)
    norm = torch.rand(CONFIG.hidden_size)
    first.initialise(seed=seed, target_norm=norm)
    second.initialise(seed=seed, target_norm=norm)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
