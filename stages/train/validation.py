"""What the drafter is worth: the same blocks at every validation, on training and held-out samples.

Expected acceptance (the overlap of draft and target distribution) is measured on both splits, over
as many blocks of as many documents a domain; greedy acceptance is speculative decoding replayed
over held-out responses. All are kept as sums (Tally), so batches and ranks add up exactly.
Cost: one forward pass over twice the held-out samples, and one over the replayed ones with a block
at every response token (docs/LOG.md has figures).

D domains, M blocks a document, N slots a block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stages.dspark.acceptance import acceptance_length, expected_acceptance, leading_matches, rounds
from stages.dspark.slots import anchor_candidates
from stages.dspark.step import Batch, StepResult
from stages.params import DOMAINS
from stages.states.source import Sample
from stages.train.batches import plan_epoch
from stages.train.passes import Passes

SEED = 7  # blocks and training documents are the same at every validation


class Tally(NamedTuple):
    """Sums over blocks by domain, by whether the response loops (0: no, 1: yes) and by slot.

    For a replay the blocks are the rounds that serving would run.
    """

    survival: Tensor  # float64 [D, 2, N] blocks accepted up to and with the slot
    blocks: Tensor  # float64 [D, 2, N] blocks that have the slot

    @classmethod
    def zero(cls, num_domains: int, num_slots: int) -> Tally:
        return cls(*torch.zeros(2, num_domains, 2, num_slots, dtype=torch.float64))

    def without_looping(self) -> Tally:
        return Tally(self.survival[:, :1], self.blocks[:, :1])

    def length(self, domain: int) -> float | None:
        """One domain's acceptance length, bonus included; None without a block."""
        blocks = self.blocks[domain].sum(0)
        if not blocks[0]:
            return None
        return acceptance_length(self.survival[domain].sum(0), blocks)

    def macro_survival(self, *, min_blocks: int) -> Tensor | None:
        """Survival by slot, float64 [N]: the mean over the domains of at least min_blocks blocks;
        over all blocks alike where no domain has as many; None without a block.

        1 + its sum is the macro acceptance length.
        """
        survival, blocks = self.survival.sum(1), self.blocks.sum(1)  # [D, N]
        enough = blocks[:, 0] >= min_blocks
        if not enough.any():
            survival, blocks = survival.sum(0, keepdim=True), blocks.sum(0, keepdim=True)
            enough = blocks[:, 0] > 0
        if not enough.any():
            return None
        return (survival[enough] / blocks[enough].clamp(min=1)).mean(0)

    def macro(self, *, min_blocks: int) -> float | None:
        survival = self.macro_survival(min_blocks=min_blocks)
        return None if survival is None else 1.0 + float(survival.sum())


class Validation(NamedTuple):
    """One validation."""

    loss: float  # held-out
    train: Tally  # expected
    held_out: Tally  # expected
    replayed: Tally  # greedy, over the held-out samples chosen for it


@dataclass(frozen=True, kw_only=True)
class Validator:
    """The samples of every validation of a run."""

    train: list[Sample]
    held_out: list[Sample]
    replayed: list[Sample]
    domains: list[str]

    @classmethod
    def choose(
        cls,
        train: Sequence[Sample],
        held_out: Sequence[Sample],
        *,
        num_anchors: int,
        num_replayed: int,
    ) -> Validator:
        """From all samples of the two splits."""
        present = {sample["domain"] for sample in (*train, *held_out)}
        return cls(
            train=matched(train, held_out, num_anchors=num_anchors),
            held_out=list(held_out),
            replayed=spread(held_out, count=num_replayed),
            domains=[*DOMAINS, *sorted(present - set(DOMAINS))],
        )

    def validate(self, passes: Passes) -> Validation:
        _, train = _expected(passes, self.train, domains=self.domains)
        loss, held_out = _expected(passes, self.held_out, domains=self.domains)
        replayed = replay(passes, self.replayed, domains=self.domains)
        return Validation(loss, train, held_out, replayed)


def replay(passes: Passes, samples: Sequence[Sample], *, domains: Sequence[str]) -> Tally:
    """Greedy speculative decoding over the samples' responses.

    Exact for responses that the target decoded greedily: a draft is accepted as long as it is the
    next token, and until then its Markov previous tokens are the true ones.
    """
    tally = Tally.zero(len(domains), passes.drafter.config.block_size)
    slots = torch.arange(tally.survival.shape[-1])
    for documents, batch, result in _batches(passes, samples, num_anchors=None):
        accepted = leading_matches(result.match & result.valid).cpu()
        places = anchor_candidates(batch.loss_mask).sum(-1).tolist()
        for row, document in enumerate(documents):
            group = _group(samples[document], domains)
            served = torch.tensor(rounds(accepted[row, : places[row]].tolist()))
            tally.survival[group] += (served.unsqueeze(-1) > slots).sum(0)
            tally.blocks[group] += len(served)
    return _total(tally, passes)


def matched(
    train: Sequence[Sample], held_out: Sequence[Sample], *, num_anchors: int
) -> list[Sample]:
    """For each held-out sample a training sample of its domain with as many blocks, or nearly so.

    Without repeats; a domain that training has too few of gives fewer. So the two curves differ by
    what was seen in training, and not by which prompts they are of.
    """
    waiting: dict[str, dict[int, list[Sample]]] = {}  # domain -> blocks -> samples
    for sample in random.Random(SEED).sample(list(train), len(train)):
        by_blocks = waiting.setdefault(sample["domain"], {})
        by_blocks.setdefault(_num_blocks(sample, num_anchors), []).append(sample)
    chosen = []
    for sample in held_out:
        by_blocks = waiting.get(sample["domain"], {})
        if by_blocks:
            wanted = _num_blocks(sample, num_anchors)
            nearest = min(by_blocks, key=lambda blocks: (abs(blocks - wanted), blocks))
            chosen.append(by_blocks[nearest].pop())
            if not by_blocks[nearest]:
                del by_blocks[nearest]
    return chosen


def spread(samples: Sequence[Sample], *, count: int) -> list[Sample]:
    """Up to `count` samples: the first of each domain, then the second of each, and so on."""
    turns: dict[str, int] = {}
    keyed = []
    for index, sample in enumerate(samples):
        turn = turns[sample["domain"]] = turns.get(sample["domain"], -1) + 1
        keyed.append((turn, index))
    return [samples[index] for _, index in sorted(keyed)[:count]]


def _expected(
    passes: Passes, samples: Sequence[Sample], *, domains: Sequence[str]
) -> tuple[float, Tally]:
    """Loss and expected acceptance over validation_anchors blocks of each sample."""
    tally = Tally.zero(len(domains), passes.drafter.config.block_size)
    loss, weight = 0.0, 0.0
    num_anchors = passes.params.validation_anchors
    for documents, _, result in _batches(passes, samples, num_anchors=num_anchors):
        accept, valid = result.accept.cpu(), result.valid.cpu()
        for row, document in enumerate(documents):
            group = _group(samples[document], domains)
            survival, blocks = expected_acceptance(accept[row], valid[row])
            tally.survival[group] += survival
            tally.blocks[group] += blocks
        loss += float(result.loss)
        weight += float(result.weight)
    loss, weight = passes.ranks.total(torch.tensor([loss, weight], dtype=torch.float64)).tolist()
    return loss / max(weight, 1e-6), _total(tally, passes)


def _total(tally: Tally, passes: Passes) -> Tally:
    return Tally(*(passes.ranks.total(sums) for sums in tally))


def _group(sample: Sample, domains: Sequence[str]) -> tuple[int, int]:
    return domains.index(sample["domain"]), int(sample["looping"])


def _num_blocks(sample: Sample, num_anchors: int) -> int:
    return min(num_anchors, int(anchor_candidates(torch.tensor(sample["loss_mask"])).sum()))


@torch.no_grad()
def _batches(
    passes: Passes, samples: Sequence[Sample], *, num_anchors: int | None
) -> Iterator[tuple[list[int], Batch, StepResult]]:
    """All samples (of this rank), with `num_anchors` blocks each, or every possible one."""
    if not samples:
        return
    lengths = [sample["num_tokens"] for sample in samples]
    tokens = passes.params.batch_tokens // (1 if num_anchors else 4)
    plan = plan_epoch(lengths, batch_tokens=tokens, seed=SEED)
    with passes.source.read(passes.upcoming(samples, plan)) as states:
        for documents in plan:
            own, loaded = passes.share(documents)
            chosen = [samples[i] for i in loaded]
            most = max(sum(sample["loss_mask"]) for sample in chosen)
            batch = passes.load(
                chosen,
                states,
                num_anchors or most,
                [SEED + i for i in loaded],
                without_blocks=not own,
            )
            yield own, batch, passes.forward(batch)
