"""Log-sum-exp of the target's logits against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.dspark.target_head import TargetHead

HIDDEN, VOCABULARY, TOKENS = 72, 1_500, 300


def _reference(states: Tensor, norm: Tensor, matrix: Tensor) -> Tensor:
    scale = (states.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return (states.double() * scale * norm.double()) @ matrix.double().T


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("likely", [True, False])
def test_log_sum_exp_and_greedy_tokens_equal_float64(
    dtype: torch.dtype, tolerance: float, likely: bool
) -> None:
    """With an unlikely following token, up to 60 below the largest logit, it is as exact."""
    torch.manual_seed(0)
    states, norm = torch.randn(TOKENS, HIDDEN), 1 + torch.rand(HIDDEN)
    matrix = (torch.randn(VOCABULARY, HIDDEN) * 0.8).bfloat16()
    logits = _reference(states, norm, matrix)
    best = logits.argmax(-1)
    following = best.clone() if likely else logits.argmin(-1)
    following[::3] = torch.randint(VOCABULARY, (TOKENS,))[::3]
    head = TargetHead(norm, 1e-5, matrix, dtype)
    sums, greedy = head.log_sum_exp(states, following)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), logits.logsumexp(-1), rtol=0, atol=tolerance)
    top = logits.topk(2).values
    clear = (top[:, 0] - top[:, 1]) > 0.5  # a bfloat16 product may swap closer ones
    assert clear.sum() > TOKENS / 2
    assert torch.equal(greedy[clear], (best == following)[clear])


def test_no_states_give_no_sums() -> None:
    head = TargetHead(torch.ones(8), 1e-5, torch.ones(4, 8), torch.bfloat16)
    sums, greedy = head.log_sum_exp(torch.empty(0, 8), torch.empty(0, dtype=torch.int64))
    assert sums.shape == greedy.shape == (0,)
