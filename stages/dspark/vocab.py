"""The reduced draft vocabulary: which target tokens the drafter can propose, and the d2t map."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_vocab(counts: Tensor, *, size: int, always: list[int]) -> Tensor:
    """The `size` most frequent token ids, ascending (ties: the lower id), `always` among them.

    counts: int64 [V], occurrences among the tokens that carry loss. Returns int64 [size].
    """
    if not 0 < size <= len(counts):
        raise ValueError(f"draft vocabulary of {size} does not fit a vocabulary of {len(counts)}")
    ranked = counts.clone()
    ranked[always] = counts.max() + 1
    order = torch.argsort(ranked, descending=True, stable=True)
    return order[:size].sort().values


def offsets(draft_vocab: Tensor) -> Tensor:
    """d2t: int64 [Vd] OFFSETS, target id = draft id + d2t[draft id] (the speculators format)."""
    return draft_vocab - torch.arange(len(draft_vocab))


def membership(draft_vocab: Tensor, *, vocab_size: int) -> Tensor:
    """t2d: bool [V], True for target ids in the draft vocabulary."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[draft_vocab] = True
    return mask


def check_d2t(d2t: Tensor, *, vocab_size: int) -> Tensor:
    """The draft vocabulary int64 [Vd] behind a d2t map.

    Raises ValueError unless it is ascending, without repeats and inside the target's vocabulary.
    """
    draft_vocab = d2t + torch.arange(len(d2t))
    inside = bool((draft_vocab >= 0).all() and (draft_vocab < vocab_size).all())
    if not inside or bool((draft_vocab.diff() <= 0).any()):
        raise ValueError(
            f"d2t does not map {len(d2t)} draft ids to distinct ascending target ids in "
            f"0..{vocab_size - 1}; was it made for another model?"
        )
    return draft_vocab


def draft_ids(draft_vocab: Tensor, *, vocab_size: int) -> Tensor:
    """int64 [V]: draft id of each target id, -1 outside the draft vocabulary."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64)
    inverse[draft_vocab] = torch.arange(len(draft_vocab))
    return inverse
