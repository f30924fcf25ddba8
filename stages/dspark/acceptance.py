"""Acceptance: what a block of drafts is worth to the verifier. All with the bonus token counted.

Shapes: [..., N] over slots of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expected_acceptance(rates: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of survival per slot and of blocks that have the slot, float64 [N] each.

    rates: [..., N] probability that a slot is accepted given those before it (the overlap
    sum(min(p, q)) of draft and target, eq. 3 of speculative sampling, Leviathan et al. 2023);
    valid: bool [..., N]. Sums, so that batches and ranks add up exactly.
    """
    survival = (rates.double() * valid).cumprod(-1)
    size = rates.shape[-1]
    return survival.reshape(-1, size).sum(0), valid.reshape(-1, size).sum(0).double()


def acceptance_length(survival: Tensor, blocks: Tensor) -> float:
    """1 + the mean survival of each slot, over the blocks that reach so far into the response."""
    return 1.0 + float((survival / blocks.clamp(min=1)).sum())


def leading_matches(matches: Tensor) -> Tensor:
    """How many slots from the first match without a gap: int64 [...] from bool [..., N]."""
    return matches.to(torch.int64).cumprod(-1).sum(-1)


def rounds(accepted: list[int]) -> list[int]:
    """Greedy speculative decoding replayed over one response.

    accepted[i] is the number of drafts accepted by a block anchored at response token i. Returns
    that of each round that serving would run: a round advances by accepted + 1.
    """
    position, served = 0, []
    while position < len(accepted):
        served.append(accepted[position])
        position += accepted[position] + 1
    return served


def walk(accepted: list[int]) -> tuple[int, int]:
    """(rounds, accepted drafts) of `rounds`."""
    served = rounds(accepted)
    return len(served), sum(served)
