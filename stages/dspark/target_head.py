"""What turns the target's last plane into its logits: the final RMS norm and the output matrix.

T tokens, H hidden size, V vocabulary.
Cost: 2 * T * H * V operations; logits of `_CHUNK` tokens live at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_CHUNK = 256  # tokens: 25 MB of bfloat16 logits for a vocabulary of 49,152
_FAR = 16.0  # a largest logit this far above the shift is rounded too coarsely
_ALIGNMENT = 32  # columns of the product: one cache line of bfloat16


class TargetHead(nn.Module):
    """norm_weight [H] and lm_head_weight [V, H], any float type; eps is the norm's.

    `dtype` is of the products; bfloat16 is what an engine of that type rounds logits to as well.
    """

    norm_weight: Tensor
    _matrix: Tensor

    def __init__(
        self,
        norm_weight: Tensor,
        eps: float,
        lm_head_weight: Tensor,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("norm_weight", norm_weight.float())
        num_tokens, self.hidden_size = lm_head_weight.shape
        padding = -(self.hidden_size + 2) % _ALIGNMENT
        minus_one = lm_head_weight.new_full((num_tokens, 2), -1)
        columns = [lm_head_weight, minus_one, minus_one.new_zeros(num_tokens, padding)]
        self.register_buffer("_matrix", torch.cat(columns, dim=1).to(dtype))

    def log_sum_exp(self, states: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Of the logits of `states`, and whether each `following` token has the largest.

        states: [T, H], before the final norm. following: int64 [T], the token after each; any
        token where there is none. Returns float32 [T] and bool [T], on the CPU.

        Each row's logits are shifted by its following token's inside the product, so that
        bfloat16 rounds by 0.4% of the distance to a likely token and not of the logit: off by
        0.01 in the mean on SmolLM2, 0.07 at most.
        """
        device = self.norm_weight.device
        sums, greedy = [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
        for chunk, after in zip(states.split(_CHUNK), following.split(_CHUNK), strict=True):
            tokens = after.to(device)
            normed = nn.functional.rms_norm(
                chunk.to(device, torch.float32), self.norm_weight.shape, self.norm_weight, self.eps
            )
            shift = (normed * self._matrix[tokens, : self.hidden_size].float()).sum(-1)
            logits = self._logits(normed, shift)
            largest = logits.amax(-1)
            greedy.append((logits.gather(1, tokens[:, None])[:, 0] >= largest).cpu())
            found = shift + _sum_in_place(logits)
            far = (largest > _FAR).nonzero()[:, 0]
            nearer = shift[far] + largest[far].float()
            found[far] = nearer + _sum_in_place(self._logits(normed[far], nearer))
            sums.append(found.cpu())
        return torch.cat(sums), torch.cat(greedy)

    def _logits(self, normed: Tensor, shift: Tensor) -> Tensor:
        """normed: float32 [T, H], shift: float32 [T], in two halves below. Returns [T, V]."""
        coarse = shift.to(self._matrix.dtype)
        fine = (shift - coarse.float()).to(self._matrix.dtype)
        row = normed.new_zeros(len(shift), self._matrix.shape[1], dtype=self._matrix.dtype)
        row[:, : self.hidden_size] = normed
        row[:, self.hidden_size], row[:, self.hidden_size + 1] = coarse, fine
        return row @ self._matrix.T


def _sum_in_place(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials, float32 [T], of logits near 0, which it overwrites."""
    return logits.exp_().sum(-1, dtype=torch.float32).log()
