"""Run by test_proposer.py as a process of its own: real engines, with every draft recorded.

    python engine_runs.py SETTINGS OUT        (SETTINGS: prompts, target, packages, runs)

A run is offline.compare(), losslessness, with changed settings; or draws from one prompt. Besides
its result it gives, for every round, the states that the target gave, where they belong, the
anchors and what was drafted.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from stages.params import ServeParams
from stages.serving import offline, speculative
from stages.serving.policy import DraftPolicy
from stages.serving.proposer import DSparkProposer, PackageMismatch, check_drafter_config
from stages.serving.worker import DSparkWorker

ROUNDS: list[list[dict[str, Any]]] = []
RAGGED = False


class RaggedPolicy(DraftPolicy):
    """Any length for any request, and rounds without a draft pass, by chance."""

    chance = random.Random(5)

    def wants_draft(self, num_requests: int) -> bool:
        super().wants_draft(num_requests)
        return self.chance.random() < 0.6

    def lengths(self, confidences: torch.Tensor, *, may_draft: torch.Tensor) -> list[int]:
        most = super().lengths(confidences, may_draft=may_draft)
        return [self.chance.randint(0, length) for length in most]


class RecordingProposer(DSparkProposer):
    def propose(self, *args: Any, **given: Any) -> list[list[int]]:  # type: ignore[override]
        self.last_confidences = None
        drafts = super().propose(*args, **given)
        metadata, rejected = given["common_attn_metadata"], given["num_rejected_tokens_gpu"]
        starts = metadata.query_start_loc.tolist()
        requests = []
        for row, name in enumerate(self.runner.input_batch.req_ids[: len(drafts)]):
            rows = slice(starts[row], starts[row + 1])
            confidences = self.last_confidences
            requests.append(
                {
                    "prompt": tuple(self.runner.requests[name].prompt_token_ids),
                    "states": given["target_hidden_states"][rows].clone(),
                    "positions": given["target_positions"][rows].clone(),
                    "rejected": 0 if rejected is None else int(rejected[row]),
                    "anchor": int(given["next_token_ids"][row]),
                    "drafts": drafts[row],
                    "confidences": None if confidences is None else confidences[row].clone(),
                }
            )
        ROUNDS.append(requests)
        return drafts


class RecordingWorker(DSparkWorker):
    proposer_class = RecordingProposer

    def init_device(self) -> None:
        super().init_device()
        if RAGGED:
            num_slots = self.model_runner.drafter.num_speculative_tokens
            self.model_runner.drafter.policy = RaggedPolicy(
                scheduler="fixed", num_slots=num_slots, threshold=0.0
            )


def refusals() -> dict[str, str]:
    good = {
        "architectures": ["Qwen3DSparkModel"],
        "sample_from_anchor": True,
        "markov_head_type": "vanilla",
        "markov_rank": 16,
        "enable_confidence_head": True,
        "block_size": 4,
    }
    check_drafter_config(SimpleNamespace(**good), num_speculative_tokens=4)
    found = {}
    for name, changes, num_tokens in [
        ("dflash", {"architectures": ["DFlashDraftModel"]}, 4),
        ("layout", {"sample_from_anchor": False}, 4),
        ("heads", {"markov_head_type": "gated"}, 4),
        ("windows", {"layer_types": ["full_attention", "sliding_attention"]}, 4),
        ("too many tokens", {}, 5),
    ]:
        try:
            check_drafter_config(
                SimpleNamespace(**{**good, **changes}), num_speculative_tokens=num_tokens
            )
        except PackageMismatch as error:
            found[name] = str(error)
    return found


def draws(
    settings: dict[str, Any],
    *,
    prompt: list[int],
    count: int,
    max_tokens: int,
    temperature: float,
    top_k: int,
) -> dict[str, Any]:
    """`count` samples after `prompt`, and how much was drafted and accepted."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(**settings)
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, max_tokens=max_tokens, ignore_eos=True
    )
    outputs = engine.generate([{"prompt_token_ids": prompt}] * count, sampling, use_tqdm=False)
    counters = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
    del engine
    cleanup_dist_env_and_memory()
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_drafts": counters["vllm:spec_decode_num_drafts"],
        "num_accepted_tokens": counters["vllm:spec_decode_num_accepted_tokens"],
    }


def one(run: dict[str, Any], *, shared: dict[str, Any]) -> dict[str, Any]:
    import engine_runs  # the module that vLLM imports the worker from, not __main__

    engine_runs.ROUNDS = []
    engine_runs.RAGGED = run.get("ragged", False)
    serve = ServeParams(**run["serve"])
    package = Path(shared["packages"][run.get("package", "trained")])
    sizes = {"max_model_len": 256, "kv_block_size": 32, "kv_cache_bytes": 2**28}
    sizes |= run.get("sizes", {})
    if "draws" in run:
        settings = {
            "model": shared["target"],
            "dtype": "float32",
            "max_model_len": 256,
            "block_size": 32,
            "kv_cache_memory_bytes": 2**28,
            "enforce_eager": True,
            "disable_log_stats": False,
            **speculative.speculative_settings(package, serve=serve, device="cpu"),
        }
        return draws(settings, prompt=shared["prompts"][0], **run["draws"])
    result = offline.compare(
        shared["prompts"],
        target=Path(shared["target"]),
        package=package,
        max_tokens=run["max_tokens"],
        serve=serve,
        changes=run.get("changes", {}),
        **sizes,
    )
    return {"result": result, "rounds": engine_runs.ROUNDS if run.get("record") else []}


def main() -> None:
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    shared = json.loads(Path(sys.argv[1]).read_text())
    speculative.WORKER_CLASS = "engine_runs.RecordingWorker"
    found = {name: one(run, shared=shared) for name, run in shared["runs"].items()}
    torch.save({"runs": found, "refusals": refusals()}, sys.argv[2])


if __name__ == "__main__":
    main()
