"""A bench in small: settings, a folder of prompts, and finished data of a cyclic language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench.quality import data
from bench.quality.settings import Settings, load_settings
from bench.quality.stage import Bench, Order
from stages import contracts
from stages.params import Params, Services
from stages.shards import SAMPLES_FILE, ShardWriter

HIDDEN, VOCAB, LAYER_IDS = 32, 64, [1, 2]
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture
def settings() -> Settings:
    return load_settings()


@pytest.fixture
def small_params(params: Params) -> Params:
    drafter = params.drafter.model_copy(
        update={"draft_vocab_size": 40, "markov_rank": 8, "block_size": 4}
    )
    train = params.train.model_copy(
        update={
            "dtype": "float32",
            "batch_tokens": 100,
            "anchors_per_sample": 4,
            "prompt_anchors": False,
        }
    )
    extract = params.extract.model_copy(update={"layer_ids": LAYER_IDS})
    return params.model_copy(update={"drafter": drafter, "train": train, "extract": extract})


@pytest.fixture
def order(tmp_path: Path) -> Order:
    """Asks for one seed and two tiny budgets over two sets of prompts."""
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for name in ("chat", "code"):
        rows = [{"messages": [{"role": "user", "content": f"{name} {i}"}]} for i in range(8)]
        (prompts / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Order(
        prompts=prompts,
        seeds=[1],
        budgets=[0.2, 0.4],
        trainers=["ours"],
        num_threads=1,
        all_rates=False,
        again=False,
        cache=tmp_path / "cache",
        file=tmp_path / "quality.jsonl",
    )


@pytest.fixture
def bench(order: Order, small_params: Params, services: Services, settings: Settings) -> Bench:
    return Bench(order=order, params=small_params, services=services, settings=settings)


@pytest.fixture
def finished_data(order: Order, small_params: Params, settings: Settings) -> Path:
    """What the stages would have left in the cache, of a language where 3t+1 follows t."""
    folder = data.folder_of(
        order.cache, data.recipe(order.prompts, params=small_params, settings=settings)
    )
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    for name in ("target", "prompts", "conversations"):
        (folder / name).mkdir(parents=True)
    (folder / "target/config.json").write_text(json.dumps(TARGET))
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN)}
    save_file(weights, folder / "target/model.safetensors")
    info = {"mask_token_id": 0, "eos_token_ids": [1]}
    for name, kind in (("target", "target"), ("prompts", "prepare"), ("conversations", "generate")):
        contracts.write_manifest(folder / name, contracts.Manifest(kind=kind, recipe={}, info=info))
    _write_states(folder / "hidden_states", folder / "pieces", embedding)
    return folder


def _write_states(out: Path, pieces: Path, embedding: torch.Tensor) -> None:
    writer = ShardWriter(out, pieces=pieces, num_planes=3, hidden_size=HIDDEN, shard_bytes=10**9)
    for i in range(24):
        tokens = [2 + i]
        while len(tokens) < 31:
            tokens.append((3 * tokens[-1] + 1) % (VOCAB - 2) + 2)
        ids = torch.tensor(tokens)
        last = 4 * embedding[ids[1:]]  # its logits peak at the next token
        planes = torch.stack([embedding[ids[:-1]], embedding[ids[:-1]] * 0.5, last], 1).bfloat16()
        logits = torch.nn.functional.rms_norm(planes[:, 2].float(), (HIDDEN,), eps=1e-5)
        row: dict[str, Any] = {
            "id": f"s{i}",
            "domain": "code" if i % 2 else "chat",
            "split": contracts.VALIDATION if i >= 18 else contracts.TRAIN,
            "looping": False,
            "num_tokens": 30,
            "input_ids": tokens[:-1],
            "loss_mask": [False] * 6 + [True] * 24,
            "supervised": [False] * 6 + [True] * 24,
            "log_sum_exp": (logits @ embedding.T).logsumexp(-1)[6:].tolist(),
            "sha256": "",
        }
        writer.append(planes.view(torch.int16).numpy().view(np.uint8).reshape(-1), row)
    writer.close()
    contracts.write_table(out / SAMPLES_FILE, writer.samples, contracts.SAMPLES)
    info = {
        "mode": "cache",
        "encoding": contracts.BFLOAT16,
        "num_planes": 3,
        "hidden_size": HIDDEN,
        "layer_ids": LAYER_IDS,
    }
    contracts.write_manifest(out, contracts.Manifest(kind="extract", recipe={}, info=info))
