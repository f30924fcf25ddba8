"""The drafter's rope equals transformers' and vLLM's for every schema of the target families."""

import pytest
import torch

from stages.dspark.model import rope_table, rotate
from stages.dspark.rope import Rope

D = 64
BASE = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "head_dim": D,
    "max_position_embeddings": 4096,
}
SCHEMAS = {
    "plain, theta beside": {"rope_theta": 500_000.0},
    "plain, theta inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "partial, beside": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "partial, inside": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        }
    },
    "linear, old": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "yarn, Qwen": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "yarn, all numbers, partial": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "partial_rotary_factor": 0.5,
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "truncate": False,
        }
    },
    "one a layer type": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_frequencies_equal_transformers(name):
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = BASE | SCHEMAS[name]
    rope = Rope.of(config)
    if name == "one a layer type":
        config = config | {"rope_parameters": config["rope_parameters"]["full_attention"]}
    if rope.type == "default":
        dim = int(D * rope.partial_rotary_factor)
        expected, factor = 1.0 / rope.theta ** (torch.arange(0, dim, 2) / dim), 1.0
    else:
        reference = PretrainedConfig(**BASE)
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in config:
                setattr(reference, key, config[key])
        reference.rope_parameters = dict(config.get("rope_parameters") or config["rope_scaling"])
        expected, factor = ROPE_INIT_FUNCTIONS[rope.type](reference, "cpu")
    positions = torch.tensor([0, 1, 17, 1000])
    cos, sin = rope_table(positions, head_dim=D, rope=rope)
    angles = positions[:, None, None] * expected
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=1e-4, atol=2e-4)
    assert cos.shape == (4, 1, int(D * rope.partial_rotary_factor) // 2)


@pytest.mark.vllm
@pytest.mark.parametrize("name", SCHEMAS)
def test_rotated_keys_equal_vllms(name):
    """From the numbers that the packaged config.json holds."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = Rope.of(BASE | SCHEMAS[name])
    keys = torch.randn(5, 2, D)
    positions = torch.tensor([0, 3, 17, 400, 900])
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(D, max_position=4096, rope_parameters=rope.to_json(), dtype=torch.float32)
        expected, _ = theirs.forward_native(positions, keys.reshape(5, -1).clone(), None)
    ours = rotate(keys, rope_table(positions, head_dim=D, rope=rope))
    torch.testing.assert_close(ours.flatten(1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_packaged_form_gives_the_same_rope_back(name):
    rope = Rope.of(BASE | SCHEMAS[name])
    assert Rope.of({"rope_parameters": rope.to_json(), "max_position_embeddings": 1}) == rope


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "long_factor": [1.0]}, "knows the types"),
        ({"rope_type": "default", "mrope_section": [8, 8, 16]}, "no M-RoPE"),
        ({"rope_type": "linear"}, "lacks factor"),
    ],
)
def test_a_rope_that_the_drafter_cannot_have_is_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        Rope.of(BASE | {"rope_theta": 1e4, "rope_scaling": rope})
