"""Run by test_memory.py in a process of its own: prints the peak of three training steps, in bytes.

Only memory that the process itself allocated counts, sampled from /proc, above what it held before.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path

import torch

from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter
from stages.dspark.step import Batch, Frozen
from stages.params import load_params
from stages.train.optimizer import Optimizer
from stages.train.passes import Passes

INTERVAL_S = 0.002


def allocated() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def main(body: dict[str, object], changes: dict[str, object], params_file: str) -> None:
    torch.set_num_threads(1)
    config = DrafterConfig.from_json(body)
    params = load_params(Path(params_file)).train.model_copy(update=changes)
    documents, tokens, blocks = (int(value) for value in sys.argv[4:7])
    torch.zeros(8, 8) @ torch.zeros(8, 8)  # libraries set themselves up
    gc.collect()
    before, peak, done = allocated(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(INTERVAL_S):
            peak = max(peak, allocated())

    threading.Thread(target=sample, daemon=True).start()
    hidden, planes = config.hidden_size, len(config.layer_ids)
    drafter = Drafter(config)
    drafter.initialise(seed=0, target_norm=torch.ones(hidden))
    embedding = torch.randn(config.vocab_size, hidden).bfloat16()
    draft_id = torch.full((config.vocab_size,), -1)
    draft_id[: config.draft_vocab_size] = torch.arange(config.draft_vocab_size)
    frozen = Frozen(
        embedding.float(),
        embedding[: config.draft_vocab_size].float(),
        torch.ones(hidden),
        1e-5,
        draft_id,
    )
    passes = Passes(
        drafter=drafter,
        frozen=frozen,
        source=None,  # type: ignore[arg-type]  # batches are made here
        params=params,
        device=torch.device("cpu"),
    )
    optimizer = Optimizer(drafter, params)
    for _ in range(3):
        batch = Batch(
            torch.randn(documents, tokens, planes * hidden),
            torch.randn(documents, tokens, hidden),
            torch.randint(0, config.vocab_size, (documents, tokens)),
            torch.ones(documents, tokens, dtype=torch.bool),
            torch.full((documents, tokens), 20.0),
            torch.randint(0, tokens - 8, (documents, blocks)).sort(-1).values,
        )
        result = passes.forward(batch)
        (result.loss / result.weight).backward()
        optimizer.step(1e-3)
    done.set()
    print(peak - before)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
