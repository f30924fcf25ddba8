"""Greedy drafts, as serving makes them: the reference for the load gate and for replays, and what
the confidences are calibrated on.

M blocks of N slots, H hidden size, R Markov rank, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.dspark.model import Drafter


class Draft(NamedTuple):
    """N slots of one block, or of M."""

    tokens: Tensor  # int64 [..., N], ids of the target's vocabulary
    logits: Tensor  # float32 [..., N, Vd], Markov bias included
    confidences: Tensor  # float32 [..., N], probabilities; ones without a confidence head


@torch.inference_mode()
def draft_greedy(
    drafter: Drafter,
    *,
    embedding: Tensor,
    lm_head: Tensor,
    draft_vocab: Tensor,
    planes: Tensor,
    anchor: int,
) -> Draft:
    """Drafts the tokens after `anchor` (a token id at position T): one block.

    embedding: [V, H] of the target; lm_head: [Vd, H]; draft_vocab: int64 [Vd] target ids;
    planes: [T, A*H], the captured states of all tokens before the anchor.
    """
    dtype = drafter.fc.weight.dtype
    states = drafter(
        planes.to(dtype).unsqueeze(0),
        torch.tensor([[planes.shape[0]]]),
        embedding[anchor].to(dtype).view(1, 1, -1),
        embedding[drafter.config.mask_token_id].to(dtype),
    )
    block = draft_blocks(
        drafter,
        states[0],
        lm_head=lm_head.to(dtype),
        draft_vocab=draft_vocab,
        anchors=torch.tensor([anchor]),
    )
    return Draft(*(part[0] for part in block))


def draft_blocks(
    drafter: Drafter, states: Tensor, *, lm_head: Tensor, draft_vocab: Tensor, anchors: Tensor
) -> Draft:
    """Slot by slot under the bias of the token drafted before.

    states: [M, N, H] of the backbone; anchors: int64 [M], the token that each block starts from.
    """
    base = F.linear(states, lm_head).float()
    markov_head, confidence_head = drafter.markov_head, drafter.confidence_head
    previous, memory = anchors, None
    tokens, logits, confidences = [], [], []
    for slot, state in enumerate(states.unbind(1)):
        embedding = drafter.markov_embedding(previous)
        biased = base[:, slot]
        if markov_head is not None:
            latent, memory = markov_head.step(embedding, state, memory)
            biased = biased + markov_head.markov_w2(latent).float()
        confidence = torch.ones(len(state), device=states.device)
        if confidence_head is not None:
            confidence = confidence_head(state, embedding).sigmoid()
        previous = draft_vocab[biased.argmax(-1)]
        tokens.append(previous)
        logits.append(biased)
        confidences.append(confidence)
    return Draft(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidences, 1))
