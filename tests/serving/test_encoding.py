"""States survive their encoding: exactly, or to float8's precision; what is not finite shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.contracts import BFLOAT16, BFLOAT16_ZSTD, FLOAT8, token_bytes
from stages.serving.encoding import decode, encode

HIDDEN = 24


def made(num_tokens: int, num_planes: int, seed: int) -> torch.Tensor:
    """Rows of very different size, as a target's planes are, one of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (6 * torch.rand(num_tokens, num_planes, 1, generator=generator) - 2)
    states = torch.randn(num_tokens, num_planes, HIDDEN, generator=generator) * size
    states[0, 0] = 0
    return states.bfloat16()


@given(
    num_tokens=st.integers(1, 9),
    num_planes=st.integers(2, 4),
    seed=st.integers(0, 99),
    encoding=st.sampled_from([BFLOAT16, BFLOAT16_ZSTD, FLOAT8]),
)
def test_what_is_encoded_comes_back(
    num_tokens: int, num_planes: int, seed: int, encoding: str
) -> None:
    states = made(num_tokens, num_planes, seed)
    raw = encode(states, encoding)
    assert raw.shape == (num_tokens, token_bytes(num_planes, HIDDEN, encoding))
    found = decode(raw, num_planes=num_planes, hidden_size=HIDDEN, encoding=encoding)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[:, -1], states[:, -1]), "the last plane is exact"
    if encoding == FLOAT8:
        # Three bits of mantissa, and below 2**-6 of the scale a step of 2**-9.
        scale = states.float().abs().amax(-1, keepdim=True) / 448
        limit = states.float().abs() * (2**-4 + 2**-8) + scale * 2**-10
        assert ((found.float() - states.float()).abs() <= limit + 1e-30).all()
    else:
        assert torch.equal(found, states)


@pytest.mark.parametrize("encoding", [BFLOAT16, FLOAT8])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("plane", [0, 1])
def test_what_is_not_finite_stays_so(encoding: str, value: float, plane: int) -> None:
    states = made(3, 2, 0)
    states[1, plane, 5] = value
    raw = encode(states, encoding)
    found = decode(raw, num_planes=2, hidden_size=HIDDEN, encoding=encoding)
    assert not found.isfinite().all()
    assert found[0].isfinite().all()
