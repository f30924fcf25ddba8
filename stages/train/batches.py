"""Which documents make up a batch, and the batch's tensors. Depends on seeds and lengths alone.

Documents are shuffled, cut into pools, sorted by length inside a pool (little padding), packed up
to a token budget, and the batches are shuffled again. One copy a document: shard page to batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from stages.dspark.slots import sample_anchors
from stages.dspark.step import Batch
from stages.states.source import Loaded, Sample
from stages.train.supervision import Mask

POOL_BATCHES = 16


def plan_epoch(lengths: Sequence[int], *, batch_tokens: int, seed: int) -> list[list[int]]:
    """Batches of document indices; len(batch) * its longest document <= batch_tokens, or one
    document alone. Every document occurs exactly once."""
    shuffle = random.Random(seed)
    order = list(range(len(lengths)))
    shuffle.shuffle(order)
    mean = sum(lengths) / max(len(lengths), 1)
    pool = max(1, int(POOL_BATCHES * batch_tokens / max(mean, 1)))
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        current: list[int] = []
        for document in sorted(order[start : start + pool], key=lambda i: (lengths[i], i)):
            if current and (len(current) + 1) * lengths[document] > batch_tokens:
                batches.append(current)
                current = []
            current.append(document)
        batches.append(current)
    shuffle.shuffle(batches)
    return batches


def load_batch(
    samples: Sequence[Sample],
    loaded: Iterator[Loaded | None],
    *,
    num_planes: int,
    hidden_size: int,
    num_anchors: int,
    seeds: Sequence[int],
    mask: Mask = "loss_mask",
) -> Batch:
    """Takes the samples' states, which are the next of `loaded`, pads them, and draws their anchors
    (one seed a sample). A rejected sample is zeros without a block.

    planes and last are bfloat16, as stored.
    """
    num_tokens = max(sample["num_tokens"] for sample in samples)
    hidden = hidden_size
    shape = (len(samples), num_tokens)
    states = torch.zeros((*shape, num_planes * hidden), dtype=torch.bfloat16)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    log_sum_exp = torch.zeros(shape)
    for row, sample in enumerate(samples):
        found = next(loaded)
        if found is None:
            continue
        length = sample["num_tokens"]
        states[row, :length] = found.states.view(length, num_planes * hidden)
        input_ids[row, :length] = torch.as_tensor(sample["input_ids"])
        loss_mask[row, :length] = torch.as_tensor(sample[mask])
        supervised = torch.as_tensor(sample["supervised"])
        log_sum_exp[row, :length][supervised] = found.log_sum_exp
    log_sum_exp *= loss_mask
    anchors = torch.stack(
        [
            sample_anchors(row, num_anchors=num_anchors, seed=seed)
            for row, seed in zip(loss_mask, seeds, strict=True)
        ]
    )
    split = (num_planes - 1) * hidden
    return Batch(
        states[..., :split], states[..., split:], input_ids, loss_mask, log_sum_exp, anchors
    )
