"""What the drafter is worth on held-out samples: expected acceptance, and greedy replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from stages.dspark.acceptance import (
    acceptance_length,
    expected_acceptance,
    leading_matches,
    walk,
)
from stages.dspark.slots import anchor_candidates
from stages.dspark.step import Batch, StepResult
from stages.train.batches import plan_epoch
from stages.train.passes import Passes, Sample

SEED = 7  # anchors of the validation blocks are the same at every validation


class Validation(NamedTuple):
    """Teacher-forced results over all validation blocks."""

    loss: float
    acceptance_length: float  # expected: by the overlap of draft and target distribution


def validate(passes: Passes, samples: Sequence[Sample]) -> Validation:
    size = passes.drafter.config.block_size
    survival, blocks = torch.zeros(2, size, dtype=torch.float64)
    loss, weight = 0.0, 0.0
    for _, _, result in _batches(passes, samples, num_anchors=passes.params.validation_anchors):
        batch_survival, batch_blocks = expected_acceptance(result.accept.cpu(), result.valid.cpu())
        survival += batch_survival
        blocks += batch_blocks
        loss += float(result.loss)
        weight += float(result.weight)
    return Validation(loss / max(weight, 1e-6), acceptance_length(survival, blocks))


def replay(passes: Passes, samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Greedy speculative decoding replayed over the samples' responses, by domain.

    Exact for responses that the target decoded greedily: a draft is accepted as long as it is
    the next token, and until then its Markov previous tokens are the true ones.
    """
    totals: dict[str, list[int]] = {}
    for documents, batch, result in _batches(passes, samples, num_anchors=None):
        accepted = leading_matches(result.match & result.valid)
        for row, document in enumerate(documents):
            places = anchor_candidates(batch.loss_mask[row]).sum()
            total = totals.setdefault(samples[document]["domain"], [0, 0])
            for i, value in enumerate(walk(accepted[row, :places].tolist())):
                total[i] += value
    return {
        domain: {"drafts": blocks, "acceptance_length": 1 + accepted / blocks}
        for domain, (blocks, accepted) in sorted(totals.items())
        if blocks
    }


@torch.no_grad()
def _batches(
    passes: Passes, samples: Sequence[Sample], *, num_anchors: int | None
) -> Iterator[tuple[list[int], Batch, StepResult]]:
    """All samples, with `num_anchors` blocks each, or every possible one."""
    lengths = [sample["num_tokens"] for sample in samples]
    tokens = passes.params.batch_tokens // (1 if num_anchors else 4)
    for documents in plan_epoch(lengths, batch_tokens=tokens, seed=SEED):
        chosen = [samples[i] for i in documents]
        most = max(sum(sample["loss_mask"]) for sample in chosen)
        batch = passes.load(chosen, num_anchors or most, [SEED + i for i in documents])
        yield documents, batch, passes.forward(batch)
