"""Held-out blocks for the calibration of the confidences (stages/dspark/calibration.py): drafted
greedily as serving drafts them, each slot after the token drafted before it.

Teacher-forced slots would not do: once a draft is wrong, serving's next confidence is that of a
slot after a wrong token. Cost: one pass over the held-out samples, about 2 s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.dspark.acceptance import leading_matches
from stages.dspark.calibration import Blocks
from stages.dspark.draft import draft_blocks
from stages.dspark.step import run_backbone
from stages.states.source import Sample
from stages.train.batches import plan_epoch
from stages.train.passes import Passes
from stages.train.validation import SEED

ANCHORS = 64  # blocks a response
CHUNK = 512  # blocks drafted at once


@torch.no_grad()
def held_out_blocks(passes: Passes, samples: Sequence[Sample], *, draft_vocab: Tensor) -> Blocks:
    """ANCHORS blocks of every sample; `passes` of one process, with the packaged weights."""
    drafter, frozen = passes.drafter, passes.frozen
    draft_vocab = draft_vocab.to(passes.device)
    lengths = [sample["num_tokens"] for sample in samples]
    plan = plan_epoch(lengths, batch_tokens=passes.params.batch_tokens, seed=SEED)
    columns: list[list[Tensor]] = [[], [], [], []]
    with passes.source.read(passes.upcoming(samples, plan)) as states:
        for documents in plan:
            chosen = [samples[i] for i in documents]
            batch = passes.load(chosen, states, ANCHORS, [SEED + i for i in documents])
            with passes.autocast():
                table, anchors, backbone = run_backbone(drafter, batch, frozen)
                following = batch.input_ids.gather(1, table.target.flatten(1)).view_as(table.target)
                present = table.valid[..., 0]
                for block in present.nonzero().split(CHUNK):
                    at = block.unbind(-1)
                    drafted = draft_blocks(
                        drafter,
                        backbone[at],
                        lm_head=frozen.head,
                        draft_vocab=draft_vocab,
                        anchors=anchors[at],
                    )
                    valid = table.valid[at]
                    rows = (
                        drafted.confidences.float(),
                        leading_matches((drafted.tokens == following[at]) & valid),
                        valid.sum(-1),
                        torch.tensor(documents, device=block.device)[block[:, 0]],
                    )
                    for column, row in zip(columns, rows, strict=True):
                        column.append(row.cpu())
    return Blocks(*(torch.cat(column) for column in columns))
