"""The memory estimate: near a measured peak, and compared with what the system says there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stages.dspark.config import DrafterConfig
from stages.params import load_params
from stages.train import memory

ROOT = Path(__file__).parents[2]
GIB = 2**30
CONFIG = DrafterConfig.for_target(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "vocab_size": 32768,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 2048,
    },
    **load_params(ROOT / "params.yaml").drafter.shape() | {"num_layers": 2},
    layer_ids=(1, 2, 3),
    mask_token_id=0,
)
PARAMS = load_params(ROOT / "params.yaml").train.model_copy(update={"dtype": "float32"})
SHAPE = memory.Pass(documents=6, tokens=256, blocks=16, backward=True)


def estimated(shape: memory.Pass = SHAPE, **changes: object) -> memory.Estimate:
    params = PARAMS.model_copy(update=changes)
    return memory.estimate(CONFIG, params, passes=[shape], tied=True, on_host=True, shards=1)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_estimate_is_near_the_measured_peak_and_not_below(optimizer: str) -> None:
    arguments = [CONFIG.to_json(), {"dtype": "float32", "optimizer": optimizer}]
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "measure_memory.py"),
            *map(json.dumps, arguments),
            str(ROOT / "params.yaml"),
            *map(str, (SHAPE.documents, SHAPE.tokens, SHAPE.blocks)),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    measured = int(done.stdout)
    assert 0.85 * measured <= estimated(optimizer=optimizer).peak <= 2 * measured


def test_more_of_anything_takes_more() -> None:
    base = estimated()
    for change in ({"documents": 12}, {"tokens": 512}, {"blocks": 32}):
        larger = memory.Pass(**(vars(SHAPE) | change))
        assert estimated(larger).activations > base.activations
    forward = memory.Pass(**(vars(SHAPE) | {"backward": False}))
    assert estimated(forward).activations < base.activations
    assert estimated(optimizer="adamw").optimizer > base.optimizer


def test_what_cannot_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = estimated(memory.Pass(documents=10**6, tokens=4096, blocks=512, backward=True))
    with pytest.raises(ValueError, match=r"GiB at its peak \(target .*activations.*does not fit"):
        memory.check(needed, device=torch.device("cpu"), processes=1)
    line = memory.check(estimated(), device=torch.device("cpu"), processes=2)
    assert f"{2 * estimated().peak / GIB:.2f} GiB for 2 processes" in line


def _host(root: Path, *, available: int, groups: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 1 kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text(groups)
    return root


def test_without_limits_the_host_decides(tmp_path: Path) -> None:
    root = _host(tmp_path, available=8 * GIB, groups="0::/user\n")
    (root / "sys/fs/cgroup/user").mkdir(parents=True)
    (root / "sys/fs/cgroup/user/memory.max").write_text("max\n")
    (root / "sys/fs/cgroup/user/memory.current").write_text("5\n")
    assert memory.host_bytes(root) == 8 * GIB
    assert memory.host_bytes(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("limited", ["sys/fs/cgroup", "sys/fs/cgroup/a", "sys/fs/cgroup/a/b"])
def test_the_tightest_group_decides_and_its_cache_is_room(tmp_path: Path, limited: str) -> None:
    root = _host(tmp_path, available=8 * GIB, groups="0::/a/b\n")
    (root / "sys/fs/cgroup/a/b").mkdir(parents=True)
    (root / limited / "memory.max").write_text(f"{3 * GIB}\n")
    (root / limited / "memory.current").write_text(f"{2 * GIB}\n")
    (root / limited / "memory.stat").write_text(f"anon {GIB}\ninactive_file {GIB}\n")
    assert memory.host_bytes(root) == 2 * GIB


def test_version_one_groups_count_too(tmp_path: Path) -> None:
    root = _host(tmp_path, available=8 * GIB, groups="8:pids:/a\n4:memory:/a\n0::/\n")
    group = root / "sys/fs/cgroup/memory/a"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (group / "memory.stat").write_text("total_inactive_file 0\n")
    assert memory.host_bytes(root) == 3 * GIB
