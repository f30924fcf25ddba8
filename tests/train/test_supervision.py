"""Training may take prompt tokens too; what measures takes those that the target produced."""

from contextlib import chdir
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.extract.stage import shared_prefix
from stages.params import load_params, load_services
from stages.states.source import Loaded
from stages.train import stage
from stages.train.batches import load_batch
from stages.train.supervision import trained_on

PARAMS = load_params(Path(__file__).resolve().parents[2] / "params.yaml").train


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_every_view_pairs_a_token_with_its_own_log_sum_exp(tokens):
    """tokens: (supervised, produced where supervised); the log-sum-exp of token i is i."""
    supervised = [kept for kept, _ in tokens]
    produced = [kept and own for kept, own in tokens]
    sample = {
        "loss_mask": produced,
        "supervised": supervised,
        "num_tokens": len(tokens),
        "input_ids": list(range(len(tokens))),
    }

    def sums(mask):
        states = torch.zeros(len(tokens), 2, 3, dtype=torch.bfloat16)
        own = torch.tensor([float(i) for i, kept in enumerate(supervised) if kept])
        loaded = iter([Loaded(states, own)])
        sizes = {"num_planes": 2, "hidden_size": 3, "num_anchors": 2, "seeds": [0]}
        batch = load_batch([sample], loaded, mask=mask, **sizes)
        assert batch.loss_mask[0].tolist() == sample[mask]
        return batch.log_sum_exp[0].tolist()

    assert sums("loss_mask") == [i * mine for i, mine in enumerate(produced)]
    assert sums("supervised") == [i * kept for i, kept in enumerate(supervised)]
    wanted = PARAMS.model_copy(update={"prompt_anchors": True})
    if supervised == produced:
        with pytest.raises(ValueError, match=r"extract\.prompt_tokens"):
            trained_on([sample], wanted)
    else:
        assert trained_on([sample], wanted) == "supervised"
    assert trained_on([sample], PARAMS.model_copy(update={"prompt_anchors": False})) == "loss_mask"


def test_a_rejected_sample_has_no_block():
    sample = {"num_tokens": 5, "input_ids": [1] * 5, "loss_mask": [True] * 5}
    batch = load_batch(
        [sample], iter([None]), num_planes=2, hidden_size=3, num_anchors=2, seeds=[0]
    )
    assert batch.anchors.tolist() == [[-1, -1]]
    assert not batch.loss_mask.any()


@given(
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=2, max_size=4),
)
def test_the_shared_prefix_is_the_longest(prefix, endings):
    rows = [{"input_ids": prefix + ending} for ending in endings]
    shared = shared_prefix(rows)
    ids = [row["input_ids"] for row in rows]
    assert len({tuple(one[:shared]) for one in ids}) == 1
    longer = {tuple(one[: shared + 1]) for one in ids}
    assert len(longer) > 1 or min(map(len, ids)) == shared


def test_prompt_anchors_without_their_log_sum_exp_are_refused_before_training(project):
    params = load_params(project / "params.yaml")
    with chdir(project), pytest.raises(ValueError, match=r"set extract\.prompt_tokens to true"):
        stage.run(
            drafter=params.drafter,
            train=params.train.model_copy(update={"prompt_anchors": True}),
            services=load_services(project / "services.yaml"),
            target=project / "data/target",
            hidden_states=project / "data/hidden_states",
            out=project / "out",
        )
