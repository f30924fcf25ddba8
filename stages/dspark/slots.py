"""The one slot table: what every slot of a block sees, predicts and is judged by.

B documents, T tokens (padded), M blocks a document, N slots a block.

A block at anchor p has N slots. Slot 0 embeds the token at p, the others the mask token. Slot k has
position p+k, is conditioned on the token at p+k (the Markov previous token), predicts the token at
p+k+1 and is judged by the target's state at p+k. The context of the block is positions < p.
This is sample_from_anchor=true of the speculators format; loss, metrics and drafting all use it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotTable(NamedTuple):
    """Indices into a document's tokens, all [B, M, N]; entries of invalid slots are in range."""

    position: Tensor  # p+k: rope position, index of the previous token and of the judging state
    target: Tensor  # p+k+1: index of the token to predict
    valid: Tensor  # bool: the target token is the target model's own, and so are all before it


def slot_table(anchors: Tensor, loss_mask: Tensor, *, block_size: int) -> SlotTable:
    """anchors: int64 [B, M], -1 for an absent block; loss_mask: bool [B, T] (False in padding)."""
    num_tokens = loss_mask.shape[1]
    position = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)
    target = position + 1
    inside = (anchors >= 0).unsqueeze(-1) & (target < num_tokens)
    position = position.clamp(0, num_tokens - 1)
    target = target.clamp(0, num_tokens - 1)
    produced = torch.gather(loss_mask.unsqueeze(1).expand(-1, anchors.shape[1], -1), 2, target)
    valid = (inside & produced).to(torch.int8).cumprod(-1).bool()
    return SlotTable(position, target, valid)


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """Positions that serving can start a block from: the target produced the token there, and the
    next. loss_mask: bool [..., T]. Returns bool [..., T]."""
    following = torch.zeros_like(loss_mask)
    following[..., :-1] = loss_mask[..., 1:]
    return loss_mask & following


def sample_anchors(loss_mask: Tensor, *, num_anchors: int, seed: int) -> Tensor:
    """Up to `num_anchors` distinct anchors of one document, ascending, padded with -1.

    loss_mask: bool [T]. Depends on the mask and the seed alone, so a resumed run draws the same.
    """
    candidates = anchor_candidates(loss_mask).nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors]
    anchors = torch.full((num_anchors,), -1, dtype=torch.int64)
    anchors[: len(chosen)] = candidates[chosen].sort().values
    return anchors
