"""speculators 0.9.0's trainer as a contender on CPU: its model, loss, optimisers and packed rows.

Its Trainer does not run without an accelerator (model.to(0), torch.accelerator.synchronize), so the
step below does what Trainer.train_epoch does, in its order, with three things patched: the device,
sdpa instead of flex attention (no backward on CPU), and its eager loss instead of the Triton one.
Rows hold train.batch_tokens tokens rather than its 8,192: the cost of its dense mask grows with
the square of the row, so short rows are to its advantage here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from speculators.models.dflash import core as dflash_core
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from torch import Tensor

from bench.quality.data import Sample
from bench.quality.problem import Problem
from bench.quality.settings import PeerSettings
from stages.dspark.model import Drafter
from stages.dspark.slots import anchor_candidates
from stages.dspark.vocab import membership, offsets
from stages.shards import ShardReader
from stages.states.source import load

FORWARD_KEYS = (
    "hidden_states",
    "input_ids",
    "loss_mask",
    "verifier_last_hidden_states",
    "document_ids",
    "position_ids",
)
CHECKED_SAMPLES, CHECKED_ANCHORS = 3, 4


class Peer:
    def __init__(
        self, problem: Problem, *, settings: PeerSettings, seed: int, learning_rate: float
    ) -> None:
        torch.manual_seed(seed)  # its weights and its anchors come from the global generator
        self._problem, self._settings, self._rate = problem, settings, learning_rate
        self.model = build_model(problem)
        self._dtype = getattr(torch, problem.train.dtype)
        self._dataset = StatesDataset(problem.data.reader, problem.data.train, dtype=self._dtype)
        self._collate = CollateFn(
            problem.train.batch_tokens,
            problem.config.hidden_size,
            num_target_layers=len(problem.config.layer_ids),
            dtype=self._dtype,
        )
        self._sampler = MultipackDistributedBatchSamplerV2(
            batch_max_length=problem.train.batch_tokens,
            lengths=self._dataset.approx_lengths,
            num_replicas=1,
            rank=0,
            seed=seed,
        )
        samples_a_row = len(problem.data.train) / len(self._sampler)
        self._arguments, _ = DSparkDraftModel.get_trainer_kwargs(
            loss_fn=json.dumps({"ce": settings.ce_weight, "tv": settings.tv_weight}),
            loss_implementation="eager",
            dflash_decay_gamma=settings.decay_gamma,
            max_anchors=round(problem.train.anchors_per_sample * samples_a_row),
            confidence_head_alpha=settings.confidence_weight,
        )
        self._optimizers = build_optimizers(
            self.model,
            TrainerConfig(
                lr=learning_rate,
                num_epochs=1,
                save_path="",
                optimizer=settings.optimizer,
                weight_decay=settings.weight_decay,
                muon_lr=learning_rate,
                muon_momentum=settings.muon_momentum,
                muon_weight_decay=settings.muon_weight_decay,
                muon_ns_steps=settings.muon_ns_steps,
                muon_adjust_lr_fn=settings.muon_adjust_lr_fn,
            ),
        )
        self._rows = self._all_rows()

    def step(self, factor: float) -> float:
        row = next(self._rows)
        with torch.autocast(
            "cpu", dtype=torch.bfloat16, enabled=self._problem.train.dtype == "bfloat16"
        ):
            _, loss, _ = self.model(**{key: row[key] for key in FORWARD_KEYS}, **self._arguments)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * factor
            optimizer.step()
        return float(loss.detach())

    def packaged(self) -> dict[str, Tensor]:
        """Our drafter's tensors, which have the same names in its checkpoint. Raises ValueError
        where our drafter does not compute its logits with them."""
        tensors = convert(self.model, self._problem)
        error = disagreement(self.model, tensors, self._problem)
        limit = self._settings.logit_tolerance
        if not error < limit:
            raise ValueError(
                "bench-quality: our drafter with the peer's weights is off the peer's own logits "
                f"by {error:.1e} (relative); at most {limit:.0e} is expected"
            )
        return tensors

    def _all_rows(self) -> Iterator[dict[str, Any]]:
        epoch = 0
        while True:
            self._sampler.set_epoch(epoch)
            for documents in self._sampler:
                yield self._collate([self._dataset[int(i)] for i in documents])
            epoch += 1


class StatesDataset(BaseDataset):
    """The cached hidden states in the form that speculators' collation takes."""

    def __init__(
        self, reader: ShardReader, samples: Sequence[Sample], *, dtype: torch.dtype
    ) -> None:
        self._reader, self._samples = reader, samples
        longest = max(sample["num_tokens"] for sample in samples)
        super().__init__(longest, hidden_states_dtype=dtype)

    def __len__(self) -> int:
        return len(self._samples)

    def _compute_approx_lengths(self) -> list[int]:
        return [sample["num_tokens"] for sample in self._samples]

    def _get_raw_data(self, index: int) -> dict[str, Tensor]:
        sample = self._samples[index]
        states = load(self._reader, sample).states
        return {
            "hidden_states": states[:, :-1].flatten(1),
            "input_ids": torch.as_tensor(sample["input_ids"]),
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": torch.as_tensor(sample["loss_mask"]),
        }


def build_model(problem: Problem) -> DSparkDraftModel:
    """Its model in the drafter's shape, initialised by itself, with the target's frozen weights.

    float32 weights, as its trainer keeps them."""
    body = {k: v for k, v in problem.config.to_json().items() if k != "architectures"}
    body["speculators_config"]["verifier"]["name_or_path"] = str(problem.data.target)
    config = DSparkSpeculatorConfig(**body)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = DSparkDraftModel(config=config)
    if problem.config.reduced_vocab:
        model.load_vocab_mappings(
            membership(problem.vocab, vocab_size=problem.config.vocab_size), offsets(problem.vocab)
        )
    model.load_verifier_weights()
    return model.float().train()


def convert(model: DSparkDraftModel, problem: Problem) -> dict[str, Tensor]:
    """The trained tensors that our drafter has; the rest is the target's own."""
    names = {name for name, _ in Drafter(problem.config).named_parameters()}
    return {name: p.detach().clone() for name, p in model.named_parameters() if name in names}


@torch.no_grad()
def disagreement(model: DSparkDraftModel, tensors: dict[str, Tensor], problem: Problem) -> float:
    """The largest relative error of our drafter's logits against its own, on test samples in
    float32; both with the Markov bias of the true previous tokens."""
    drafter = Drafter(problem.config)
    drafter.load_packaged(tensors)
    frozen = problem.frozen("float32")
    size, worst = problem.config.block_size, 0.0
    for sample in problem.data.test[:: max(1, len(problem.data.test) // CHECKED_SAMPLES)]:
        states = load(problem.data.reader, sample).states.float()
        ids, mask = (torch.tensor(sample[key]) for key in ("input_ids", "loss_mask"))
        places = anchor_candidates(mask).nonzero().flatten()
        places = places[places + size <= len(ids)]
        if not len(places):
            continue
        spread = torch.linspace(0, len(places) - 1, min(CHECKED_ANCHORS, len(places))).long()
        anchors = places[spread]
        planes = states[:, :-1].flatten(1).unsqueeze(0)
        previous = ids[anchors.unsqueeze(-1) + torch.arange(size)]  # [M, N]
        ours = drafter(
            planes,
            anchors.unsqueeze(0),
            frozen.embedding[ids[anchors]].unsqueeze(0),
            frozen.embedding[problem.config.mask_token_id],
        )[0]
        ours = ours @ frozen.head.T + drafter.markov_embedding(previous) @ drafter.markov_w2.T
        with _anchors_are(anchors):
            hidden, base, *_ = model._backbone_forward(
                planes,
                ids.unsqueeze(0),
                mask.unsqueeze(0),
                states[:, -1].unsqueeze(0),
                torch.zeros(1, len(ids), dtype=torch.int64),
                max_anchors=len(anchors),
            )
        theirs = base.view(ours.shape) + model.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=hidden.view(*previous.shape, -1)
        )
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    return worst


@contextmanager
def _anchors_are(anchors: Tensor) -> Iterator[None]:
    """Its draw of anchors gives these, for a comparison on equal blocks."""
    drawn = dflash_core.select_anchors
    dflash_core.select_anchors = lambda *_, **__: (anchors, torch.ones_like(anchors).bool())
    try:
        yield
    finally:
        dflash_core.select_anchors = drawn
