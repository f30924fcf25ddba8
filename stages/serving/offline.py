"""Greedy float32 decoding with and without the drafter, in one process: the losslessness gate.

    python -m stages.serving.offline --target DIR --package DIR --prompts FILE --out FILE
        --max-tokens N --max-model-len N --kv-block-size N --kv-cache-bytes N --serve JSON

--serve is the section serve of params.yaml.

--prompts holds a JSON list of token id lists; --out gets {"plain": [...], "batch_1": [...],
"batch_all": [...]}, each the generated token ids in the prompts' order, and "num_drafts" and
"num_accepted_tokens" of the two runs with the drafter. float32 because in bfloat16 even plain
decoding differs from itself across batch sizes: only float32 tells a wrong engine from rounding.

Run it as a process of its own: an engine in the process of a stage would outlive its use.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.params import ServeParams
from stages.serving.speculative import speculative_settings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.serving.offline")
    for name in ("target", "package", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in (
        "max-tokens",
        "max-model-len",
        "kv-block-size",
        "kv-cache-bytes",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--serve", type=ServeParams.model_validate_json, required=True)
    arguments = parser.parse_args()
    prompts = json.loads(arguments.prompts.read_text())
    result = compare(
        prompts,
        target=arguments.target,
        package=arguments.package,
        max_tokens=arguments.max_tokens,
        max_model_len=arguments.max_model_len,
        kv_block_size=arguments.kv_block_size,
        kv_cache_bytes=arguments.kv_cache_bytes,
        serve=arguments.serve,
    )
    arguments.out.write_text(json.dumps(result))


def compare(
    prompts: list[list[int]],
    *,
    target: Path,
    package: Path,
    max_tokens: int,
    max_model_len: int,
    kv_block_size: int,
    kv_cache_bytes: int,
    serve: ServeParams,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Decodes `prompts` plainly, then with the drafter one by one and all together.

    `changes`: engine arguments of the run with the drafter that win over the others.
    """
    # One process an engine: no start of a second interpreter, and its metrics are in reach.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    shared: dict[str, Any] = {
        "model": str(target),
        "dtype": "float32",
        "max_model_len": max_model_len,
        "block_size": kv_block_size,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "enforce_eager": True,
        "disable_log_stats": False,
        "max_num_seqs": max(len(prompts), 1),
    }
    drafter = speculative_settings(package, serve=serve, device=_device())
    plain = _decode(shared, [prompts], max_tokens=max_tokens)
    one_by_one, together = [[prompt] for prompt in prompts], [prompts]
    drafted = _decode(
        {**shared, **drafter, **(changes or {})}, [*one_by_one, *together], max_tokens=max_tokens
    )
    return {
        "plain": plain["token_ids"][0],
        "batch_1": [batch[0] for batch in drafted["token_ids"][:-1]],
        "batch_all": drafted["token_ids"][-1],
        "num_drafts": drafted["counters"].get("vllm:spec_decode_num_drafts", 0),
        "num_accepted_tokens": drafted["counters"].get("vllm:spec_decode_num_accepted_tokens", 0),
        "num_draft_tokens": drafted["counters"].get("vllm:spec_decode_num_draft_tokens", 0),
        "num_preemptions": drafted["counters"].get("vllm:num_preemptions", 0),
    }


def _decode(
    settings: dict[str, Any], batches: list[list[list[int]]], *, max_tokens: int
) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(**settings)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    token_ids = []
    for batch in batches:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in batch], sampling, use_tqdm=False
        )
        token_ids.append([list(output.outputs[0].token_ids) for output in outputs])
    counters = {
        metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")
    }
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"token_ids": token_ids, "counters": counters}


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
