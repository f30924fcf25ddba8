"""One greedy draft, as serving makes it: the reference for the load gate and for replays."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.dspark.model import Drafter


class Draft(NamedTuple):
    """N slots of one block."""

    tokens: Tensor  # int64 [N], ids of the target's vocabulary
    logits: Tensor  # float32 [N, Vd], Markov bias included
    confidences: Tensor  # float32 [N], probabilities; ones without a confidence head


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
    """Drafts the tokens after `anchor` (a token id at position T).

    embedding: [V, H] of the target; lm_head: [Vd, H]; draft_vocab: int64 [Vd] target ids;
    planes: [T, A*H], the captured states of all tokens before the anchor.
    """
    dtype = drafter.fc.weight.dtype
    states = drafter(
        planes.to(dtype).unsqueeze(0),
        torch.tensor([[planes.shape[0]]]),
        embedding[anchor].to(dtype).view(1, 1, -1),
        embedding[drafter.config.mask_token_id].to(dtype),
    )[0, 0]
    base = F.linear(states, lm_head.to(dtype)).float()
    markov_head, confidence_head = drafter.markov_head, drafter.confidence_head
    previous, memory = torch.tensor(anchor), None
    tokens, logits, confidences = [], [], []
    for slot, state in enumerate(states):
        embedding = drafter.markov_embedding(previous)
        biased = base[slot]
        if markov_head is not None:
            latent, memory = markov_head.step(embedding, state, memory)
            biased = biased + markov_head.markov_w2(latent).float()
        confidence = torch.ones(())
        if confidence_head is not None:
            confidence = confidence_head(state, embedding).sigmoid()
        previous = draft_vocab[biased.argmax()]
        tokens.append(previous)
        logits.append(biased)
        confidences.append(confidence)
    return Draft(torch.stack(tokens), torch.stack(logits), torch.stack(confidences))
