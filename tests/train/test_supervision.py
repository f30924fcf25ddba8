"""Training may take prompt tokens too; what measures takes those that the target produced."""

from contextlib import chdir

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.extract.stage import shared_prefix
from stages.params import load_params, load_services
from stages.train import stage
from stages.train.supervision import all_tokens, own_tokens


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_every_view_pairs_a_token_with_its_own_log_sum_exp(tokens):
    """tokens: (supervised, produced where supervised); the log-sum-exp of token i is i."""
    supervised = [kept for kept, _ in tokens]
    produced = [kept and own for kept, own in tokens]
    sample = {
        "loss_mask": produced,
        "supervised": supervised,
        "log_sum_exp": [float(i) for i, kept in enumerate(supervised) if kept],
    }
    own = own_tokens(sample)
    assert own["loss_mask"] == produced
    assert own["log_sum_exp"] == [float(i) for i, mine in enumerate(produced) if mine]
    if supervised == produced:
        with pytest.raises(ValueError, match=r"extract\.prompt_tokens"):
            all_tokens([sample])
    else:
        [whole] = all_tokens([sample])
        assert whole["loss_mask"] == supervised
        assert whole["log_sum_exp"] == sample["log_sum_exp"]


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
