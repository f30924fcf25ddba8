"""Which tokens the drafter can propose, and what that leaves out.

V target tokens, Vd draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.dspark.config import DrafterConfig
from stages.dspark.vocab import choose_vocab, membership
from stages.states.source import Sample


def draft_vocabulary(
    samples: Sequence[Sample], config: DrafterConfig, *, always: list[int]
) -> Tensor:
    """The draft vocabulary, int64 [Vd] target ids, by frequency among the tokens with loss."""
    return choose_vocab(token_counts(samples, config), size=config.draft_vocab_size, always=always)


def token_counts(samples: Sequence[Sample], config: DrafterConfig) -> Tensor:
    """How often each target token occurs with loss, int64 [V]."""
    counts = torch.zeros(config.vocab_size, dtype=torch.int64)
    for sample in samples:
        tokens = torch.tensor(sample["input_ids"])[torch.tensor(sample["loss_mask"])]
        counts += torch.bincount(tokens, minlength=config.vocab_size)
    return counts


def out_of_vocabulary(
    samples: Sequence[Sample], vocab: Tensor, config: DrafterConfig
) -> dict[str, float]:
    """Share of the loss tokens that the drafter cannot propose, over `all` and by domain."""
    known = membership(vocab, vocab_size=config.vocab_size)
    counts: dict[str, list[int]] = {}
    for sample in samples:
        tokens = torch.tensor(sample["input_ids"])[torch.tensor(sample["loss_mask"])]
        missing = int((~known[tokens]).sum())
        for group in ("all", sample["domain"]):
            count = counts.setdefault(group, [0, 0])
            count[0] += missing
            count[1] += len(tokens)
    return {group: missing / total for group, (missing, total) in counts.items()}
