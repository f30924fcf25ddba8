"""The benchmark compares like with like: both trainers start from one loss on the same tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import train_step
from bench.problem import Shape, document_lengths, make_problem
from stages.dspark.slots import slot_table

SMALL = Shape(120, 8, 512, documents=2)


@given(documents=st.integers(1, 40), mean=st.integers(50, 300))
def test_document_lengths_add_up_to_the_shapes_tokens(documents, mean):
    lengths = document_lengths(Shape(documents * mean, documents, 512, documents=documents))
    assert sum(lengths) == documents * mean
    assert len(lengths) == documents
    assert all(abs(length / mean - 1) <= 0.04 + 1 / mean for length in lengths)


def test_every_slot_of_a_problem_is_supervised_and_the_row_holds_the_same_tokens(params):
    config = train_step.shape_config(SMALL, params)
    problem = make_problem(config, SMALL, dtype=torch.float32, seed=3)
    batch = problem.batch
    table = slot_table(batch.anchors, batch.loss_mask, block_size=config.block_size)
    assert bool(table.valid.all())
    row, anchors = problem.packed(batch.input_ids)[0], problem.packed_anchors()
    assert len(row) == SMALL.tokens
    assert torch.equal(row[anchors], batch.input_ids.gather(1, batch.anchors).flatten())


def test_blocks_that_do_not_fit_are_refused(params):
    crowded = Shape(120, 100, 512, documents=2)
    with pytest.raises(ValueError, match="do not fit evenly"):
        make_problem(train_step.shape_config(crowded, params), crowded, dtype=torch.float32, seed=3)


@pytest.mark.peer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_comparison_starts_from_one_loss_and_times_both(params, dtype):
    result = train_step.compare(params, SMALL, dtype, repetitions=1)
    assert set(result["seconds"]) == {"muon", "adamw"}
    assert all(by[name] > 0 for by in result["seconds"].values() for name in ("ours", "peer"))
    summary = train_step.summary([result | {"memory_mib": {"ours": 1.0, "peer": 4.0}}])
    assert summary["memory_ratio_max"] == 0.25
    assert (summary["ratio_min_bf16"] is None) == (dtype == "float32")
    assert summary["ratio_long_bf16"] is None


@pytest.mark.peer
def test_contenders_that_differ_in_loss_are_refused(params, monkeypatch):
    monkeypatch.setitem(train_step.LOSS_TOLERANCE, "float32", -1.0)
    with pytest.raises(ValueError, match="do not compute the same thing"):
        train_step.compare(params, SMALL, "float32", repetitions=1)
