"""A drafter with random weights, and one that knows some bigrams: what package and serving tests
use in place of a trained one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize

from stages import contracts
from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter
from stages.dspark.vocab import membership, offsets
from stages.weights import load_target_weights


def config_for(target: Path, *, layer_ids: Sequence[int], **changes: Any) -> DrafterConfig:
    """One layer, blocks of 4, a draft vocabulary of 2048, unless changed."""
    shape: dict[str, Any] = {
        "num_layers": 1,
        "block_size": 4,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "head_dim": None,
        "intermediate_size": None,
        "draft_vocab_size": 2048,
        "sliding_window": None,
        "sliding_layers": [],
        "markov_head": "vanilla",
        "markov_rank": 64,
        "confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return DrafterConfig.for_target(
        json.loads((target / "config.json").read_text()),
        **{**shape, **changes},
        layer_ids=tuple(layer_ids),
        mask_token_id=contracts.read_manifest(target, "target").info["mask_token_id"],
    )


def random_tensors(config: DrafterConfig, target: Path, *, seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 tensors with the names of the packaged checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in Drafter(config).named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_gain = name.endswith("norm.weight")
        tensors[name] = (1 + 0.1 * noise if is_gain else 0.05 * noise).bfloat16()
    if config.reduced_vocab:
        order = torch.randperm(config.vocab_size, generator=generator)
        set_vocabulary(tensors, order[: config.draft_vocab_size].tolist(), config, target)
    return tensors


def set_vocabulary(
    tensors: dict[str, Tensor], ids: Iterable[int], config: DrafterConfig, target: Path
) -> Tensor:
    vocab = torch.tensor(sorted(ids))
    assert len(vocab) == config.draft_vocab_size
    tensors["d2t"] = offsets(vocab)
    tensors["t2d"] = membership(vocab, vocab_size=config.vocab_size)
    tensors["lm_head.weight"] = load_target_weights(target).lm_head[vocab].bfloat16()
    return vocab


def teach_bigrams(
    tensors: dict[str, Tensor],
    sequences: Iterable[Sequence[int]],
    config: DrafterConfig,
    target: Path,
    *,
    share: float = 0.7,
    strength: float = 60.0,
) -> None:
    """Makes the Markov head predict a share of these bigrams: drafts are accepted partly."""
    following = {a: b for sequence in sequences for a, b in itertools.pairwise(sequence)}
    generator = torch.Generator().manual_seed(1)
    wanted = set(following.values())
    spare = (token for token in range(config.vocab_size) if token not in wanted)
    ids = [*wanted, *(next(spare) for _ in range(config.draft_vocab_size - len(wanted)))]
    vocab = set_vocabulary(tensors, ids, config, target).tolist()
    codes = normalize(
        torch.randn(config.vocab_size, config.markov_rank, generator=generator), dim=-1
    )
    weight = torch.zeros(config.draft_vocab_size, config.markov_rank)
    draft_id = {token: index for index, token in enumerate(vocab)}
    for token, after in following.items():
        if torch.rand(1, generator=generator) < share:
            weight[draft_id[after]] += strength * codes[token]
    tensors["markov_head.markov_w1.weight"] = codes.bfloat16()
    tensors["markov_head.markov_w2.weight"] = weight.bfloat16()


def write_package(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    save_file(tensors, folder / "model.safetensors")
    return folder


def random_samples(config: DrafterConfig, *, count: int, last_plane: bool) -> dict[str, Tensor]:
    """Gate samples of random states, with the last plane as drafter/gate.safetensors has it."""
    generator = torch.Generator().manual_seed(2)
    width = (len(config.layer_ids) + last_plane) * config.hidden_size
    samples: dict[str, Tensor] = {}
    for i in range(count):
        length = 20 + 25 * i
        samples[f"planes_{i}"] = torch.randn(length, width, generator=generator).bfloat16()
        samples[f"input_ids_{i}"] = torch.randint(
            0, config.vocab_size, (length,), generator=generator
        )
        samples[f"anchors_{i}"] = torch.tensor([1, length // 2, length - 2])
    return samples
