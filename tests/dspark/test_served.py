"""What vLLM cannot serve is refused with the reason, when params are read and by the package."""

import pytest
import yaml

from stages.dspark.served import HEAD_DIMS, check_served, unserved
from stages.params import check_params
from tests.small_run import PROJECT

SERVED = {"markov_head": "vanilla", "sliding_layers": (), "head_dim": 64}
UNSERVED = {
    "gated": ({"markov_head": "gated"}, "markov_head gated"),
    "rnn": ({"markov_head": "rnn"}, "markov_head rnn"),
    "none": (
        {"markov_head": "none", "markov_rank": 0, "confidence_head_with_markov": False},
        "markov_head none",
    ),
    "windows": ({"sliding_window": 64, "sliding_layers": [0]}, r"sliding_layers \[0\]"),
    "heads": ({"head_dim": 48}, "head_dim 48"),
}
CONTRADICTIONS = {
    "rank without head": ({"markov_head": "none"}, "markov_rank is 0 exactly where"),
    "head without rank": ({"markov_rank": 0}, "markov_rank is 0 exactly where"),
    "embedding without head": (
        {"markov_head": "none", "markov_rank": 0},
        "set it to false",
    ),
    "embedding without confidence": ({"confidence_head": False}, "set it to false"),
}


def _params(**drafter):
    values = yaml.safe_load((PROJECT / "params.yaml").read_text())
    values["drafter"] |= drafter
    return check_params(values, "params.yaml")


@pytest.mark.parametrize("name", UNSERVED)
def test_params_refuse_what_vllm_does_not_serve_unless_it_is_an_experiment(name):
    changes, message = UNSERVED[name]
    with pytest.raises(ValueError, match=f"would not serve this drafter: {message}"):
        _params(**changes, experiment=False)
    assert _params(**changes, experiment=True).drafter.experiment


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_heads_that_contradict_each_other_are_refused_even_as_an_experiment(name):
    changes, message = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=message):
        _params(**changes, experiment=True)


def test_every_reason_is_given_at_once():
    reasons = unserved(markov_head="rnn", sliding_layers=[1], head_dim=33)
    assert len(reasons) == 3
    check_served(**SERVED, experiment=False)
    check_served(**SERVED | {"head_dim": None}, experiment=False)


@pytest.mark.vllm
def test_the_head_sizes_are_those_of_vllms_cpu_attention():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(HEAD_DIMS) == CPUAttentionBackend.get_supported_head_sizes()
