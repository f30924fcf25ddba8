"""What turns the target's last plane into its logits: the final RMS norm and the output matrix.

T tokens, H hidden size, V vocabulary. All arithmetic is float32: log-sum-exp over a large
vocabulary in bfloat16 would be off by more than a drafter's loss.
Cost: 2 * T * H * V operations; logits of `_CHUNK` tokens live at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_CHUNK = 128  # tokens: 25 MB of logits for a vocabulary of 49,152


class TargetHead(nn.Module):
    """norm_weight [H] and lm_head_weight [V, H], any float type; eps is the norm's."""

    norm_weight: Tensor
    lm_head_weight: Tensor

    def __init__(self, norm_weight: Tensor, eps: float, lm_head_weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("norm_weight", norm_weight.float())
        self.register_buffer("lm_head_weight", lm_head_weight.float())
        self.eps = eps

    def logits(self, states: Tensor) -> Tensor:
        """states: [T, H], before the final norm. Returns float32 [T, V]."""
        normed = nn.functional.rms_norm(
            states.float(), self.norm_weight.shape, self.norm_weight, self.eps
        )
        return normed @ self.lm_head_weight.T

    def log_sum_exp(self, states: Tensor) -> Tensor:
        """states: [T, H]. Returns float32 [T]."""
        return self.log_sum_exp_and_argmax(states)[0]

    def log_sum_exp_and_argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """states: [T, H]. Returns float32 [T] and the greedy tokens, int64 [T]."""
        sums, tokens = [], []
        for chunk in states.split(_CHUNK):
            logits = self.logits(chunk)
            sums.append(logits.logsumexp(-1))
            tokens.append(logits.argmax(-1))
        if not sums:
            return torch.empty(0), torch.empty(0, dtype=torch.int64)
        return torch.cat(sums), torch.cat(tokens)
