"""Training that starts from an earlier package goes on where that left off, or is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stages import contracts
from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter
from stages.dspark.vocab import offsets
from stages.params import load_params, load_services
from stages.train import stage

CONFIG = DrafterConfig.for_target(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "vocab_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    },
    **load_params(Path(__file__).parents[2] / "params.yaml").drafter.shape(),
    layer_ids=(1, 2),
    mask_token_id=0,
)
SHORT = {"max_steps": 12, "num_epochs": 1, "validations": 1}


@pytest.fixture
def train(project: Path) -> Callable[..., Path]:
    def run(
        out: str = "data/drafter", *, drafter: dict[str, Any] | None = None, **changes: Any
    ) -> Path:
        params = load_params(project / "params.yaml")
        stage.run(
            drafter=params.drafter.model_copy(update=drafter or {}),
            train=params.train.model_copy(update=SHORT | changes),
            services=load_services(project / "services.yaml"),
            target=project / "data/target",
            hidden_states=project / "data/hidden_states",
            out=project / out,
        )
        return project / out

    return run


@pytest.fixture
def package(project: Path, train: Callable[..., Path]) -> Path:
    """What the package stage makes of a short run: bfloat16 weights beside config.json."""
    drafter, folder = train("data/first", max_steps=60), project / "package"
    folder.mkdir()
    (folder / "config.json").write_text((drafter / "config.json").read_text())
    tensors = load_file(drafter / "model.safetensors")
    tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def lengths(drafter: Path) -> list[float]:
    with (drafter / "curve.csv").open() as file:
        return [float(row["validation_acceptance_length"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learning_rate_of_zero_gives_the_package_back(
    package: Path, train: Callable[..., Path], dtype: str
) -> None:
    same = train(warm_start=str(package), learning_rate=0.0, validations=2, dtype=dtype)
    first, second = lengths(same)
    assert first == second > 1.05
    found, given = load_file(same / "model.safetensors"), load_file(package / "model.safetensors")
    for name, value in given.items():
        assert torch.equal(value.to(found[name].dtype), found[name]), name
    recipe = contracts.read_manifest(same, "train").recipe
    files = ("config.json", "model.safetensors")
    sums = {name: contracts.file_sha256(package / name) for name in files}
    assert recipe["inputs"]["warm_start"] == contracts.fingerprint(sums)


def test_a_warm_start_is_ahead_of_a_cold_one(package: Path, train: Callable[..., Path]) -> None:
    (cold,) = lengths(train("data/cold"))
    (warm,) = lengths(train("data/warm", warm_start=str(package)))
    assert warm > cold + 0.1


def test_another_architecture_is_refused_with_both_values(
    package: Path, train: Callable[..., Path]
) -> None:
    message = r"block_size: 3 in params, 4 in the package; markov_rank: 4 in params, 8 in the pack"
    with pytest.raises(ValueError, match=message):
        train(warm_start=str(package), drafter={"block_size": 3, "markov_rank": 4})


def test_another_vocabulary_is_refused_with_both_or_kept(
    package: Path, train: Callable[..., Path]
) -> None:
    tensors = load_file(package / "model.safetensors")
    chosen = tensors["t2d"].nonzero().flatten()
    left_out = (~tensors["t2d"]).nonzero().flatten()
    other = torch.cat([chosen[1:], left_out[:1]]).sort().values
    tensors["d2t"] = offsets(other)
    save_file(tensors, package / "model.safetensors")
    message = (
        r"1 of the 60 tokens .* \(the data's is \w+ and covers [\d.]+%.*; the package's is \w+"
    )
    with pytest.raises(ValueError, match=message):
        train(warm_start=str(package))
    kept = train(warm_start=str(package), warm_start_vocabulary="keep")
    found = load_file(kept / "model.safetensors")
    assert torch.equal(found["t2d"].nonzero().flatten(), other)


def test_what_is_no_package_is_refused(project: Path, train: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"nowhere without config.json and model.safetensors"):
        train(warm_start="nowhere")
    folder = project / "foreign"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"foreign/config.json: "):
        train(warm_start=str(folder))


@given(seed=st.integers(0, 2**31), exponent=st.floats(-2.0, 6.0))
def test_reconditioning_changes_nothing_that_is_computed(seed: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(CONFIG)
    drafter.initialise(seed=seed % 1000, target_norm=torch.ones(CONFIG.hidden_size))
    before = drafter.packaged()
    rms = 10.0**exponent * (torch.rand(drafter.fc.in_features, generator=generator) + 1e-3)
    drafter.recondition(rms)
    after = drafter.packaged()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    ratio = drafter.plane_scale * rms  # what fc sees, of root mean square one
    assert bool(((ratio > 0.7) & (ratio < 1.42)).all())
