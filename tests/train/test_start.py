"""Before the first step, heads of the first layer look at the newest context token."""

import dataclasses

import pytest
import torch

from stages.dspark.model import Drafter, rope_table, rotate
from stages.dspark.rope import Rope
from stages.train.start import look_at_newest
from tests.dspark.small import CONFIG, HIDDEN

TOKENS, BLOCK = 60, 5


def _data(g, *, count, tokens, planes):
    """Vectors with a mean of their own, as states and embeddings have, and channels of size one."""
    mean = torch.randn(planes * HIDDEN, generator=g)
    return mean + torch.randn(count, tokens, planes * HIDDEN, generator=g)


def _weights(drafter, context, block):
    """Attention of every query head over (context, block), [heads, slots, tokens + slots]."""
    layer, config = drafter.layers[0], drafter.config
    attention, D = layer.self_attn, config.head_dim
    x, seen = layer.input_layernorm(block), drafter.hidden_norm(drafter.fc(context))
    ropes = [
        rope_table(torch.arange(start, start + len(rows)), head_dim=D, rope=config.rope)
        for start, rows in ((len(seen), x), (0, seen))
    ]
    q = rotate(attention.q_norm(attention.q_proj(x).view(len(x), -1, D)), ropes[0])
    k_block = rotate(attention.k_norm(attention.k_proj(x).view(len(x), -1, D)), ropes[0])
    k_seen = rotate(attention.k_norm(attention.k_proj(seen).view(len(seen), -1, D)), ropes[1])
    k = torch.cat([k_seen, k_block]).repeat_interleave(attention.num_groups, 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * D**-0.5).softmax(-1)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=100_000.0),
        Rope(theta=10_000.0, partial_rotary_factor=0.5),
        Rope(theta=10_000.0, type="linear", factor=2.0),
    ],
    ids=["default", "partial", "linear"],
)
def test_two_of_three_key_value_heads_look_at_the_newest_token(rope):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64}
    config = dataclasses.replace(CONFIG, rope=rope, **heads)
    g = torch.Generator().manual_seed(5)
    drafter = Drafter(config)
    drafter.initialise(seed=3, target_norm=torch.ones(HIDDEN))
    second = {name: p.clone() for name, p in drafter.layers[1].named_parameters()}
    planes = _data(g, count=40, tokens=TOKENS, planes=2)
    embeddings = _data(g, count=40, tokens=TOKENS, planes=1)
    mask = embeddings[0, 0]
    look_at_newest(drafter, zip(planes[1:], embeddings[1:], strict=True), mask_embedding=mask)

    block = torch.cat([embeddings[0, 1:2], mask.expand(BLOCK - 1, -1)])
    with torch.no_grad():
        weights = _weights(drafter, planes[0], block)
    newest = weights[:, :, TOKENS - 1]
    assert newest[:4, 0].min() > 0.25 > 3 * newest[4:, 0].max()
    assert (weights[:4, 0, :TOKENS].argmax(-1) == TOKENS - 1).all()
    assert newest[2:4].min() > 0.1  # the wide one does in every slot
    for name, parameter in drafter.layers[1].named_parameters():
        assert torch.equal(parameter, second[name]), name
