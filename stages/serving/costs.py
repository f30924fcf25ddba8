"""Measures the engine's cost table at start-up: seconds of a target step by its tokens, and of a
draft pass by its requests. Runs inside vLLM's worker, when nothing is served yet.

A step's time hardly depends on how its tokens are spread over requests, so each request has one.
What vLLM does around the model (scheduling, sampling, answering) is not in it: the policy learns it
from the rounds that it serves. Of each size the fastest of a few passes over all of them counts, so
that a disturbed second spoils none. Cost: about 3 s on two cores for SmolLM2-135M.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

if TYPE_CHECKING:
    from stages.serving.proposer import DSparkProposer

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REQUESTS = (1, 2, 4, 8, 16, 32)
REPEATS = 4  # after one to warm up


def measure_costs(
    runner: Any, proposer: DSparkProposer
) -> tuple[dict[int, float], dict[int, float]]:
    """(seconds of a step by tokens, seconds of a draft pass by requests)."""
    context = min(256, proposer.max_model_len // 2)
    most = min(runner.max_num_tokens, runner.max_num_reqs * (1 + proposer.num_speculative_tokens))

    def step(tokens: int) -> Any:
        hidden, _ = runner._dummy_run(tokens, force_attention=True, profile_seq_lens=context)
        return runner.model.compute_logits(hidden[:tokens])

    def draft(num_requests: int) -> Any:
        return _draft(proposer, num_requests=num_requests, context=context)

    proposer.measuring = True  # a dummy run would run the drafter as well
    try:
        steps = _fastest(step, [n for n in TOKENS if n <= most])
    finally:
        proposer.measuring = False
    drafts = _fastest(draft, [n for n in REQUESTS if n <= runner.max_num_reqs])
    return steps, drafts


def _draft(proposer: DSparkProposer, *, num_requests: int, context: int) -> None:
    """One draft pass after one token of context each; keys and values are written nowhere."""
    device = proposer.device
    blocks = -(-proposer.max_model_len // proposer.block_size)
    metadata = CommonAttentionMetadata(
        query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32, device=device),
        query_start_loc_cpu=torch.arange(num_requests + 1, dtype=torch.int32),
        seq_lens=torch.full((num_requests,), context, dtype=torch.int32, device=device),
        seq_lens_cpu_upper_bound=torch.full((num_requests,), context, dtype=torch.int32),
        num_reqs=num_requests,
        num_actual_tokens=num_requests,
        max_query_len=1,
        max_seq_len=context,
        # Block 0 is the one that vLLM leaves unused.
        block_table_tensor=torch.zeros(num_requests, blocks, dtype=torch.int32, device=device),
        slot_mapping=torch.full((num_requests,), -1, dtype=torch.int64, device=device),
    )
    width = proposer.model.model.fc.input_size
    proposer.draft(
        states=torch.randn(num_requests, width, device=device).to(proposer.dtype),
        positions=torch.full((num_requests,), context - 1, device=device),
        next_token_ids=torch.zeros(num_requests, dtype=torch.int32, device=device),
        metadata=metadata,
    )


def _fastest(call: Callable[[int], Any], sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of a call by size."""
    fastest = dict.fromkeys(sizes, math.inf)
    for attempt in range(1 + REPEATS):
        for size in sizes:
            started = time.perf_counter()
            call(size)
            if attempt:
                fastest[size] = min(fastest[size], time.perf_counter() - started)
    return fastest
