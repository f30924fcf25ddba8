"""A small drafter and batches of a language that it can learn: token t is followed by 3t + 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter
from stages.dspark.rope import Rope
from stages.dspark.slots import sample_anchors
from stages.dspark.step import Batch, Frozen, LossWeights
from stages.dspark.vocab import draft_ids

VOCAB, DRAFT, HIDDEN, TOKENS, DOCUMENTS, EPS = 97, 80, 64, 24, 4, 1e-5
CONFIG = DrafterConfig(
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    rms_norm_eps=EPS,
    rope=Rope(theta=10_000.0),
    max_position_embeddings=64,
    block_size=4,
    mask_token_id=0,
    layer_ids=(1, 2),
    sliding_window=None,
    sliding_layers=(),
    markov_head="vanilla",
    markov_rank=8,
    confidence_head=True,
    confidence_head_with_markov=True,
    target_architecture="LlamaForCausalLM",
)
WEIGHTS = LossWeights(
    ce=0.1,
    tv=0.9,
    kl=0.0,
    confidence=0.1,
    ce_label="next_token",
    position_weighting="decay",
    position_decay=0.85,
    dpace_smoothing=0.5,
)


def make_drafter(config: DrafterConfig = CONFIG) -> Drafter:
    drafter = Drafter(config)
    drafter.initialise(seed=1, target_norm=torch.ones(HIDDEN))
    return drafter


def make_frozen() -> Frozen:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    vocab = torch.arange(DRAFT)
    return Frozen(
        embedding, embedding[vocab], torch.ones(HIDDEN), EPS, draft_ids(vocab, vocab_size=VOCAB)
    )


def make_batch(frozen: Frozen, *, seed: int) -> Batch:
    """Documents with 18 loss tokens and 5 blocks each; the last plane points at the next token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.empty(DOCUMENTS, TOKENS + 1, dtype=torch.int64)
    ids[:, 0] = torch.randint(1, VOCAB, (DOCUMENTS,), generator=generator)
    for i in range(TOKENS):
        ids[:, i + 1] = (3 * ids[:, i] + 1) % VOCAB
    noise = torch.randn(DOCUMENTS, TOKENS, HIDDEN, generator=generator)
    now, following = frozen.embedding[ids[:, :-1]], frozen.embedding[ids[:, 1:]]
    last = following + 0.5 * noise
    loss_mask = (torch.arange(TOKENS) >= 6).expand(DOCUMENTS, -1).contiguous()
    logits = F.rms_norm(last, (HIDDEN,), eps=EPS) @ frozen.embedding.T
    anchors = torch.stack(
        [
            sample_anchors(mask, num_anchors=5, seed=seed * 100 + i)
            for i, mask in enumerate(loss_mask)
        ]
    )
    return Batch(
        torch.cat([now + 0.1 * noise, 0.5 * following], -1),
        last,
        ids[:, :-1],
        loss_mask,
        logits.logsumexp(-1) * loss_mask,
        anchors,
    )
