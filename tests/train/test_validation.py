"""Validation against slow references: serving's own loop for the replay, and averages of laid-out
rounds; and that train and held-out figures are of like samples."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages import contracts
from stages.dspark.config import DrafterConfig
from stages.dspark.draft import draft_greedy
from stages.dspark.model import Drafter
from stages.dspark.slots import anchor_candidates
from stages.dspark.step import Frozen
from stages.dspark.vocab import draft_ids
from stages.params import DOMAINS, Params
from stages.shards import ShardWriter
from stages.states.source import CachedStates, Sample
from stages.train import curves
from stages.train.confidence import held_out_blocks
from stages.train.passes import Passes
from stages.train.validation import Tally, Validation, Validator, matched, replay, spread

HIDDEN, VOCAB, DRAFT_VOCAB, PLANES, BLOCK, TOKENS = 16, 40, 30, 3, 4, 24
MIN_BLOCKS = 3


def sample(index: int, *, num_tokens: int = TOKENS, looping: bool = False) -> Sample:
    generator = torch.Generator().manual_seed(index)
    prompt = 3 + index % 4
    return {
        "id": f"s{index}",
        "domain": DOMAINS[index % 3],
        "split": contracts.VALIDATION,
        "num_tokens": num_tokens,
        "input_ids": torch.randint(2, 12, (num_tokens,), generator=generator).tolist(),
        "loss_mask": [i >= prompt for i in range(num_tokens)],
        "supervised": [i >= prompt for i in range(num_tokens)],
        "log_sum_exp": [9.0] * (num_tokens - prompt),
        "looping": looping,
        "sha256": "",
    }


@pytest.fixture
def passes(tmp_path: Path, params: Params) -> tuple[Passes, list[Sample]]:
    """A random drafter that often agrees with the random text, so that rounds differ in length."""
    torch.manual_seed(0)
    config = DrafterConfig.for_target(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
        },
        **params.drafter.model_copy(
            update={"block_size": BLOCK, "draft_vocab_size": DRAFT_VOCAB, "markov_rank": 4}
        ).shape(),
        layer_ids=(1, 2),
        mask_token_id=0,
    )
    drafter = Drafter(config)
    drafter.initialise(seed=0, target_norm=torch.ones(HIDDEN))
    embedding, vocab = torch.randn(VOCAB, HIDDEN), torch.arange(DRAFT_VOCAB)
    writer = ShardWriter(
        tmp_path / "states",
        pieces=tmp_path / "pieces",
        num_planes=PLANES,
        hidden_size=HIDDEN,
        shard_bytes=10**9,
    )
    samples = [sample(i, looping=i in (1, 5)) for i in range(7)]
    for one in samples:
        states = torch.randn(TOKENS, PLANES, HIDDEN).bfloat16().view(torch.uint8).numpy()
        writer.append(np.ascontiguousarray(states), one)
    writer.close()
    # Text that repeats tokens is easy for the Markov head alone: it learns it from counts.
    pairs = torch.zeros(VOCAB, VOCAB)
    for one in samples:
        for before, after in zip(one["input_ids"], one["input_ids"][1:], strict=False):
            pairs[before, after] += 1
    u, s, v = torch.linalg.svd(pairs)
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.copy_(u[:, :4] * s[:4] * 20)
        drafter.markov_head.markov_w2.weight.copy_(v[:4, :DRAFT_VOCAB].T)
    info = {"num_planes": PLANES, "hidden_size": HIDDEN, "encoding": contracts.BFLOAT16}
    manifest = contracts.Manifest(kind="extract", recipe={}, info=info)
    changes = {"dtype": "float32", "batch_tokens": 200, "validation_anchors": 6}
    made = Passes(
        drafter=drafter,
        frozen=Frozen(
            embedding,
            embedding[vocab],
            torch.ones(HIDDEN),
            1e-5,
            draft_ids(vocab, vocab_size=VOCAB),
        ),
        source=CachedStates(tmp_path / "states", manifest),
        params=params.train.model_copy(update=changes),
        device=torch.device("cpu"),
    )
    rows = [{**kept, **one} for kept, one in zip(writer.samples, samples, strict=True)]
    return made, rows


def decode(passes: Passes, one: Sample) -> list[int]:
    """Reference: accepted drafts of each round, drafting as serving does, token by token."""
    with passes.source.read([one]) as read:
        loaded = next(read)
    assert loaded is not None
    states = loaded.states.float()
    planes = states[:, :-1].flatten(1)
    tokens, served = one["input_ids"], []
    at = int(anchor_candidates(torch.tensor(one["loss_mask"])).nonzero()[0])
    while at + 1 < len(tokens):
        draft = draft_greedy(
            passes.drafter,
            embedding=passes.frozen.embedding,
            lm_head=passes.frozen.head,
            draft_vocab=torch.arange(DRAFT_VOCAB),
            planes=planes[:at],
            anchor=tokens[at],
        ).tokens.tolist()
        accepted = 0
        for drafted, true in zip(draft, tokens[at + 1 :], strict=False):
            if drafted != true:
                break
            accepted += 1
        served.append(accepted)
        at += accepted + 1
    return served


def test_the_replay_is_what_serving_would_do(passes: tuple[Passes, list[Sample]]) -> None:
    made, samples = passes
    domains = list(DOMAINS)
    tally = replay(made, samples, domains=domains)
    by_domain: dict[str, list[int]] = {}
    plain: dict[str, list[int]] = {}
    for one in samples:
        served = decode(made, one)
        by_domain.setdefault(one["domain"], []).extend(served)
        if not one["looping"]:
            plain.setdefault(one["domain"], []).extend(served)
    everything = [count for served in by_domain.values() for count in served]
    assert len(set(everything)) > 2, "rounds of several lengths, or nothing is tested"
    for domain, served in by_domain.items():
        index = domains.index(domain)
        assert tally.length(index) == pytest.approx(1 + sum(served) / len(served))
        counted = plain[domain]
        length = tally.without_looping().length(index)
        assert length == pytest.approx(1 + sum(counted) / len(counted))
        reached = [sum(count > k for count in served) for k in range(BLOCK)]
        assert tally.survival[index].sum(0).tolist() == reached


def test_confidences_for_calibration_are_those_of_served_drafts(
    passes: tuple[Passes, list[Sample]],
) -> None:
    """Each block drafted alone, token by token: the same confidences, and as many accepted."""
    made, samples = passes
    blocks = held_out_blocks(made, samples, draft_vocab=torch.arange(DRAFT_VOCAB))
    assert sorted(set(blocks.sample.tolist())) == list(range(len(samples)))
    with made.source.read(samples) as read:
        planes = [loaded.states.float()[:, :-1].flatten(1) for loaded in read if loaded]
    for index, one in enumerate(samples):
        rows = (blocks.sample == index).nonzero().flatten()
        anchors = anchor_candidates(torch.tensor(one["loss_mask"])).nonzero().flatten().tolist()
        assert len(rows) == len(anchors), "every possible block, as there are fewer than ANCHORS"
        for row, at in zip(rows.tolist(), anchors, strict=True):
            draft = draft_greedy(
                made.drafter,
                embedding=made.frozen.embedding,
                lm_head=made.frozen.head,
                draft_vocab=torch.arange(DRAFT_VOCAB),
                planes=planes[index][:at],
                anchor=one["input_ids"][at],
            )
            torch.testing.assert_close(blocks.confidences[row], draft.confidences)
            following = one["input_ids"][at + 1 :][: len(draft.tokens)]
            pairs = zip(draft.tokens.tolist(), following, strict=False)
            accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            assert (int(blocks.accepted[row]), int(blocks.slots[row])) == (accepted, len(following))


def test_a_validation_repeats_itself_and_its_names_do_not_depend_on_the_samples(
    passes: tuple[Passes, list[Sample]],
) -> None:
    made, samples = passes
    validator = Validator.choose(samples[:4], samples[4:], num_anchors=6, num_replayed=2)
    rows = [
        curves.curve_row(v.validate(made), domains=v.domains, min_blocks=MIN_BLOCKS)
        for v in (
            validator,
            validator,
            Validator.choose([], samples[:1], num_anchors=6, num_replayed=1),
        )
    ]
    assert rows[0] == rows[1]
    assert list(rows[0]) == list(rows[2])
    for name in ("train", "validation", "validation_greedy"):
        survival = [rows[0][f"{name}_survival/{k}"] or 0.0 for k in range(1, BLOCK + 1)]
        assert rows[0][f"{name}_acceptance_length"] == pytest.approx(1 + sum(survival))
    assert rows[2]["train_acceptance_length"] is None, "no training sample, no figure"


tallies = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, BLOCK)), min_size=1, max_size=40
)


def _tally(rounds: list[tuple[int, bool, int]]) -> Tally:
    tally = Tally.zero(3, BLOCK)
    for domain, looping, accepted in rounds:
        tally.survival[domain, int(looping), :accepted] += 1
        tally.blocks[domain, int(looping)] += 1
    return tally


@given(tallies, st.integers(1, 6))
def test_macro_is_the_mean_over_domains_of_enough_blocks(
    rounds: list[tuple[int, bool, int]], min_blocks: int
) -> None:
    tokens = {d: [1 + a for domain, _, a in rounds if domain == d] for d in range(3)}
    enough = [values for values in tokens.values() if len(values) >= min_blocks]
    if not enough:
        enough = [[1 + a for _, _, a in rounds]]
    reference = sum(sum(values) / len(values) for values in enough) / len(enough)
    tally = _tally(rounds)
    assert tally.macro(min_blocks=min_blocks) == pytest.approx(reference)
    plain = [one for one in rounds if not one[1]]
    expected = _tally(plain).macro(min_blocks=min_blocks)
    assert tally.without_looping().macro(min_blocks=min_blocks) == expected
    metrics = curves.position_metrics(tally, min_blocks=min_blocks)
    survived = 1.0
    for entry in metrics.values():
        survived *= entry["conditional"] or 0.0
        assert entry["survival"] == pytest.approx(survived)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(4, 30)), max_size=30),
    st.lists(st.tuples(st.integers(0, 2), st.integers(4, 30)), max_size=10),
)
def test_training_samples_match_the_held_out_in_domain_and_blocks(
    training: list[tuple[int, int]], held: list[tuple[int, int]]
) -> None:
    def make(kinds: list[tuple[int, int]]) -> list[dict[str, Any]]:
        return [
            {"id": str(i), "domain": DOMAINS[d], "loss_mask": [True] * n}
            for i, (d, n) in enumerate(kinds)
        ]

    train, held_out = make(training), make(held)
    chosen = matched(train, held_out, num_anchors=16)
    names = [one["id"] for one in chosen]
    assert len(names) == len(set(names))
    assert chosen == matched(train, held_out, num_anchors=16)
    for domain in DOMAINS[:3]:
        wanted, given_, got = (
            [one for one in some if one["domain"] == domain] for some in (held_out, train, chosen)
        )
        assert len(got) == min(len(wanted), len(given_))
    # A held-out sample among the training ones would be matched in blocks exactly.
    both = matched(held_out, held_out, num_anchors=16)
    blocks = [min(16, len(one["loss_mask"]) - 1) for one in both]
    assert blocks == [min(16, len(one["loss_mask"]) - 1) for one in held_out]


def test_samples_are_spread_over_the_domains() -> None:
    samples = [{"domain": domain, "id": n} for domain in "abc" for n in range(3)]
    order = [(one["domain"], one["id"]) for one in spread(samples, count=5)]
    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1)]


def test_what_is_empty_is_no_number() -> None:
    empty = Tally.zero(1, BLOCK)
    assert empty.length(0) is None
    assert empty.macro(min_blocks=1) is None
    row = curves.curve_row(
        Validation(0.5, empty, empty, empty), domains=["qa"], min_blocks=MIN_BLOCKS
    )
    assert {name for name, value in row.items() if value is not None} == {"validation_loss"}
