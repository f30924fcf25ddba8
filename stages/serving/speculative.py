"""How vLLM is told to serve a package: the same folder on CPU and on CUDA. No vLLM import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stages.dspark.config import DrafterConfig

WORKER_CLASS = "stages.serving.worker.DSparkWorker"


def read_drafter_config(package: Path) -> DrafterConfig:
    """The package's config.json. Raises ValueError naming the file when it is no DSpark drafter."""
    path = package / "config.json"
    try:
        return DrafterConfig.from_json(json.loads(path.read_text()))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe a DSpark drafter: {error!r}") from None


def speculative_settings(
    package: Path, *, num_speculative_tokens: int, device: str
) -> dict[str, Any]:
    """Engine arguments (vllm.LLM's keyword arguments) that add the packaged drafter.

    On CUDA, Model Runner V2 has the method `dspark`. CPU has V1 alone, whose `dflash` method serves
    the package through our proposer, put in place by the worker class.
    Raises ValueError for a device without a known way, or more draft tokens than the block has.
    """
    config = read_drafter_config(package)
    if not 1 <= num_speculative_tokens <= config.block_size:
        raise ValueError(
            f"num_speculative_tokens must be in 1..{config.block_size} (block_size of {package}), "
            f"found {num_speculative_tokens}"
        )
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, found {device!r}")
    speculative: dict[str, Any] = {
        "method": "dspark" if device == "cuda" else "dflash",
        "model": str(package),
        "num_speculative_tokens": num_speculative_tokens,
    }
    if device == "cuda":
        return {"speculative_config": speculative}
    return {"speculative_config": speculative, "worker_cls": WORKER_CLASS}


def speculative_arguments(package: Path, *, num_speculative_tokens: int, device: str) -> list[str]:
    """The same as flags of vLLM's API server."""
    settings = speculative_settings(
        package, num_speculative_tokens=num_speculative_tokens, device=device
    )
    arguments = ["--speculative-config", json.dumps(settings["speculative_config"])]
    if "worker_cls" in settings:
        arguments += ["--worker-cls", settings["worker_cls"]]
    return arguments
