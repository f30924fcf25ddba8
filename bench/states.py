"""What the benchmarks of hidden states share: the default target, real texts, transformers' planes.

T tokens, P planes, H hidden size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages import contracts
from stages.params import Params
from stages.states.source import Sample
from stages.target import stage as target_stage

SCRATCH = Path("run/bench")
TEXTS = Path("data/authored/sampled")


def make_target(params: Params) -> Path:
    """The target of params.yaml; data/target where that is it."""
    recipe = contracts.recipe({"target": params.target}, {})
    made = Path("data/target")
    with suppress(contracts.ArtifactError):
        manifest = contracts.read_manifest(made, "target", verify=False)
        if manifest.recipe == recipe:
            return made.resolve()
    folder = SCRATCH / "target"
    if not (folder / contracts.MANIFEST).is_file():
        SCRATCH.mkdir(parents=True, exist_ok=True)
        with chdir(SCRATCH):
            target_stage.run(target=params.target, out=Path("target"))
    return folder.resolve()


def token_rows(target: Path, *, count: int, num_tokens: int, seed: int) -> list[list[int]]:
    """`count` rows of about num_tokens (half to one and a half times): real texts, joined.

    No two rows of any seed begin alike, so that a prefix cache finds nothing.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    generator = random.Random(seed)
    texts = [
        json.loads(line)["prompt"]
        for path in sorted(TEXTS.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    rows = []
    for index in range(count):
        length = generator.randint(num_tokens // 2, num_tokens * 3 // 2)
        row: list[int] = tokenizer.encode(f"{seed} {index} ")
        while len(row) < length:
            row += tokenizer.encode(" " + generator.choice(texts))
        rows.append(row[:length])
    return rows


def sample(index: int, ids: list[int], *, supervised: float) -> Sample:
    """A row of contracts.SAMPLES to be extracted; that share of its end is a response."""
    start = len(ids) - int(len(ids) * supervised)
    mask = [position >= start for position in range(len(ids))]
    return {
        "id": str(index),
        "domain": "qa",
        "split": contracts.TRAIN,
        "looping": False,
        "num_tokens": len(ids),
        "input_ids": ids,
        "loss_mask": mask,
        "supervised": mask,
        "log_sum_exp": [],
        "sha256": "",
    }


def load_model(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def planes(
    model: Any, rows: Sequence[list[int]], layer_ids: Sequence[int], *, batch_rows: int
) -> Iterator[Tensor]:
    """Each row's states, bfloat16 [T, P, H], from batches of rows padded on the right."""
    final: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: final.append(inputs[0]))
    try:
        for start in range(0, len(rows), batch_rows):
            batch = rows[start : start + batch_rows]
            longest = max(map(len, batch))
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
            mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
            found = model.model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
            states = torch.stack([*(found[k] for k in layer_ids), final.pop()], dim=2)
            for one, row in zip(states, batch, strict=True):
                yield one[: len(row)]
    finally:
        hook.remove()
