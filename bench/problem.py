"""One training problem in the two forms that the contenders read: padded documents, a packed row.

Shapes: B documents, T tokens of the longest, L packed tokens (the sum of lengths), M blocks a
document, N slots, A planes, H hidden size, V vocabulary, Vd draft vocabulary.

Tensors are random, in SmolLM2-135M's dimensions. Every slot of every block is supervised, the token
after a position is the target's argmax over the draft vocabulary and the log-sum-exp is over the
draft vocabulary: there the two trainers' conventions coincide, so that both compute the same loss.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.dspark.config import DrafterConfig
from stages.dspark.step import Batch, Frozen
from stages.dspark.vocab import draft_ids

SPREAD = 0.04  # of document lengths: pads as much as plan_epoch does on the authored prompts
PROMPT_SHARE = 0.25  # of a document's tokens, without loss
PLANE_STD, LOGIT_STD = 3.0, 3.0


class Shape(NamedTuple):
    """Sizes of one problem; `tokens` and `anchors` are totals over the documents."""

    tokens: int
    anchors: int
    draft_vocab_size: int
    documents: int

    def __str__(self) -> str:
        return f"{self.tokens}/{self.anchors}/{self.draft_vocab_size}"


class Problem(NamedTuple):
    config: DrafterConfig
    lengths: list[int]  # tokens of each document
    vocab: Tensor  # int64 [Vd], target ids of the draft vocabulary, ascending
    batch: Batch
    frozen: Frozen

    def packed(self, padded: Tensor) -> Tensor:
        """[1, L, ...] from [B, T, ...]."""
        rows = [row[:length] for row, length in zip(padded, self.lengths, strict=True)]
        return torch.cat(rows).unsqueeze(0)

    def packed_anchors(self) -> Tensor:
        """int64 [B * M], as positions of the packed row."""
        starts = torch.tensor([0, *self.lengths[:-1]]).cumsum(0)
        return (self.batch.anchors + starts.unsqueeze(-1)).flatten()


def document_lengths(shape: Shape) -> list[int]:
    """Ascending lengths within SPREAD of their mean; their sum is shape.tokens."""
    mean = shape.tokens / shape.documents
    place = (torch.arange(shape.documents, dtype=torch.float64) + 0.5) / shape.documents  # in 0..1
    ends = (mean * (1 + SPREAD * (2 * place - 1))).cumsum(0)
    cuts = [0, *ends.round().long().tolist()]
    return [after - before for before, after in itertools.pairwise(cuts)]


def make_problem(config: DrafterConfig, shape: Shape, *, dtype: torch.dtype, seed: int) -> Problem:
    """`config` names draft_vocab_size as `shape` does; `dtype` is that of states and frozen
    tensors. Raises ValueError where documents are too short for their blocks."""
    lengths, per_document = document_lengths(shape), shape.anchors // shape.documents
    size, hidden = config.block_size, config.hidden_size
    first = int(PROMPT_SHARE * lengths[0])
    if shape.anchors % shape.documents or lengths[0] - size - first <= per_document:
        raise ValueError(
            f"shape {shape}: {shape.anchors} blocks of {size} do not fit evenly into "
            f"{shape.documents} documents of at least {lengths[0]} tokens"
        )
    g = torch.Generator().manual_seed(seed)
    extent = (shape.documents, max(lengths))
    inside = torch.arange(extent[1]) < torch.tensor(lengths).unsqueeze(-1)  # [B, T]
    vocab = torch.randperm(config.vocab_size, generator=g)[: shape.draft_vocab_size].sort().values
    embedding = torch.randn(config.vocab_size, hidden, generator=g)
    head = torch.randn(shape.draft_vocab_size, hidden, generator=g) * LOGIT_STD / hidden**0.5
    head = head.to(dtype)
    width = len(config.layer_ids) * hidden
    planes = torch.randn(*extent, width, generator=g) * PLANE_STD * inside.unsqueeze(-1)
    last = (torch.randn(*extent, hidden, generator=g) * inside.unsqueeze(-1)).to(dtype)
    norm = torch.rand(hidden, generator=g) + 0.5
    argmax, log_sum_exp = [], []
    for row in last:  # logits of one document at a time
        normed = F.rms_norm(row.float(), norm.shape, norm, config.rms_norm_eps)
        logits = normed @ head.float().T
        argmax.append(vocab[logits.argmax(-1)])
        log_sum_exp.append(logits.logsumexp(-1))
    input_ids = torch.zeros(extent, dtype=torch.int64)
    input_ids[:, 1:] = torch.stack(argmax)[:, :-1]
    anchors = []
    for length in lengths:
        places = torch.randperm(length - size - first, generator=g)[:per_document]
        anchors.append(first + places.sort().values)
    batch = Batch(
        planes.to(dtype),
        last,
        input_ids * inside,
        inside & (torch.arange(extent[1]) >= first),
        torch.stack(log_sum_exp),
        torch.stack(anchors),
    )
    frozen = Frozen(
        embedding.to(dtype),
        head,
        norm,
        config.rms_norm_eps,
        draft_ids(vocab, vocab_size=config.vocab_size),
    )
    return Problem(config, lengths, vocab, batch, frozen)
