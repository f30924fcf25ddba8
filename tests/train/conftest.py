"""A project folder in small: a language that a drafter can learn, its target and hidden states."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import save_file

from stages import contracts

ROOT = Path(__file__).parents[2]
HIDDEN, VOCAB, PLANES = 32, 64, 3
LAYER_IDS = [1, 2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with data/target and data/hidden_states of a cyclic language: token t is
    followed by 3t+1, and the states tell the token, so a drafter can learn it."""
    g = torch.Generator().manual_seed(0)
    target, states = tmp_path / "data/target", tmp_path / "data/hidden_states"
    target.mkdir(parents=True)
    states.mkdir(parents=True)
    embedding = torch.randn(VOCAB, HIDDEN, generator=g)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (target / "config.json").write_text(json.dumps(config))
    save_file(
        {
            "model.embed_tokens.weight": embedding.bfloat16(),
            "model.norm.weight": torch.ones(HIDDEN),
        },
        target / "model.safetensors",
    )
    info = {"mask_token_id": 0, "eos_token_ids": [1], "tokenizer_sha256": "t"}
    contracts.write_manifest(target, contracts.Manifest(kind="target", recipe={}, info=info))

    rows, samples = [], []
    for i in range(24):
        tokens = [2 + i]
        while len(tokens) < 30:
            tokens.append((3 * tokens[-1] + 1) % (VOCAB - 2) + 2)
        ids = torch.tensor(tokens)
        following = torch.tensor([*tokens[1:], 5])
        last = 4 * embedding[following]  # so that lm_head(norm(last)) peaks at the next token
        planes = torch.stack([embedding[ids], embedding[ids] * 0.5, last], 1).bfloat16()
        raw = planes.reshape(len(ids), -1).view(torch.int16).numpy().tobytes()
        mask = [False] * 6 + [True] * 24
        logits = (
            torch.nn.functional.rms_norm(planes[:, 2].float(), (HIDDEN,), eps=1e-5)
            @ embedding.bfloat16().float().T
        )
        rows.append(np.frombuffer(raw, dtype=np.uint8).reshape(len(ids), -1))
        samples.append(
            {
                "id": f"s{i}",
                "domain": "qa",
                "split": "validation" if i >= 20 else "train",
                "looping": i % 4 == 3,
                "shard": 0,
                "row_group": i,
                "num_tokens": len(ids),
                "input_ids": tokens,
                "loss_mask": mask,
                "supervised": mask,
                "log_sum_exp": logits.logsumexp(-1)[torch.tensor(mask)].tolist(),
                "sha256": "",
            }
        )
    schema = contracts.states_schema(PLANES, HIDDEN)
    with pq.ParquetWriter(
        states / "shard-00000.parquet", schema, compression="none", use_dictionary=False
    ) as writer:
        for row in rows:
            column = pa.array([bytes(token) for token in row], type=schema.field(0).type)
            writer.write_table(pa.table([column], schema=schema))
    contracts.write_table(states / "samples.parquet", samples, contracts.SAMPLES)
    info = {
        "mode": "cache",
        "encoding": contracts.BFLOAT16,
        "layer_ids": LAYER_IDS,
        "num_planes": PLANES,
        "hidden_size": HIDDEN,
    }
    contracts.write_manifest(states, contracts.Manifest(kind="extract", recipe={}, info=info))

    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["drafter"] |= {
        "num_layers": 1,
        "block_size": 4,
        "head_dim": 32,
        "draft_vocab_size": 60,
        "markov_rank": 8,
    }
    params["train"] |= {
        "dtype": "float32",
        "num_epochs": 40,
        "batch_tokens": 240,
        "anchors_per_sample": 8,
        "prompt_anchors": False,
        "learning_rate": 0.01,
        "validations": 4,
        "validation_anchors": 8,
        "checkpoint_interval_s": 60,
    }
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    services = yaml.safe_load((ROOT / "services.yaml").read_text())
    services["train"]["num_threads"] = (
        1  # a second one waits more than it works on shapes like these
    )
    (tmp_path / "services.yaml").write_text(yaml.safe_dump(services))
    monkeypatch.chdir(tmp_path)
    return tmp_path
