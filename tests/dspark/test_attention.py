"""The attention's own backward equals autograd's through the textbook attention."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.dspark.attention import block_attention
from stages.dspark.model import _SwiGlu


def _reference(query, context_key, context_value, block_key, block_value, outside):
    """Every query against the concatenated keys of its context and its block."""
    M, T = outside.shape[1:]
    G = query.shape[2]
    keys = torch.cat([context_key.unsqueeze(2).expand(-1, -1, M, -1, -1), block_key], 3)
    values = torch.cat([context_value.unsqueeze(2).expand(-1, -1, M, -1, -1), block_value], 3)
    scores = torch.einsum("bkgmnd,bkmjd->bkgmnj", query, keys)
    hidden = torch.nn.functional.pad(outside, (0, keys.shape[3] - T))
    scores = scores.masked_fill(hidden[:, None, None, :, None], float("-inf"))
    assert scores.shape[2] == G
    return torch.einsum("bkgmnj,bkmjd->bkgmnd", scores.softmax(-1), values)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.tuples(*(st.integers(1, 3) for _ in range(4)), st.integers(1, 4), st.integers(1, 7)),
)
def test_values_and_gradients_equal_autograd_over_textbook_attention(seed, sizes):
    B, K, G, M, N, T = sizes
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, K, G, M, N, 4), (B, K, T, 4), (B, K, T, 4), (B, K, M, N, 4), (B, K, M, N, 4)]
    tensors = [torch.randn(shape, generator=g) for shape in shapes]
    outside = torch.arange(T) >= torch.randint(T + 1, (B, M, 1), generator=g)  # also no context
    weight = torch.randn(shapes[0], generator=g)
    first, second = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    ours = block_attention(*first, outside=outside)
    reference = _reference(*second, outside)
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    (ours * weight).sum().backward()
    (reference * weight).sum().backward()
    for mine, expected in zip(first, second, strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_the_gated_unit_has_autograds_gradients():
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(_SwiGlu.apply, (gate, up))
