"""Conversation artifacts for the extract stage, without running generate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from stages import contracts
from stages.serving.client import Client, run_bounded
from stages.serving.launch import Endpoint

Rows = list[tuple[list[int], int]]
"""Token ids and how many of them are the prompt's."""


def write_conversations(
    folder: Path, rows: Rows, *, temperature: float, validation: int = 0
) -> Path:
    """The artifact of the stage generate; the last `validation` rows are held out."""
    folder.mkdir()
    first_held_out = len(rows) - validation
    table = [
        {
            "id": f"c{index:04d}",
            "domain": "qa",
            "split": contracts.TRAIN if index < first_held_out else contracts.VALIDATION,
            "input_ids": ids,
            "loss_mask": [position >= prompt for position in range(len(ids))],
            "finish_reason": "length",
            "looping": index % 2 == 1,
        }
        for index, (ids, prompt) in enumerate(rows)
    ]
    contracts.write_table(folder / "conversations.parquet", table, contracts.CONVERSATIONS)
    recipe = {"params": {"generate": {"temperature": temperature}}}
    contracts.write_manifest(folder, contracts.Manifest(kind="generate", recipe=recipe))
    return folder


def random_rows(count: int, *, seed: int = 0) -> Rows:
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(generator.integers(10, 120))
        rows.append((generator.integers(5, 49152, length).tolist(), length // 2))
    return rows


def greedy_rows(endpoint: Endpoint, count: int, *, longest: int = 20) -> Rows:
    """Random prompts of at most `longest` tokens and the endpoint's own responses of 40."""

    async def run() -> Rows:
        async with Client(endpoint.url, model=endpoint.model, timeout_s=120) as client:

            async def one(prompt: list[int]) -> list[int]:
                answer = await client.complete(prompt, max_tokens=40, temperature=0.0)
                return answer.token_ids

            prompts = [ids[:longest] for ids, _ in random_rows(count, seed=1)]
            return [
                (prompt + response, len(prompt))
                async for prompt, response in run_bounded(prompts, one, concurrency=8)
            ]

    return asyncio.run(run())
