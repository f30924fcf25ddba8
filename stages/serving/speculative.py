"""How vLLM is told to serve a package: the same folder on CPU and on CUDA. No vLLM import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stages import contracts
from stages.dspark.config import DrafterConfig
from stages.params import ServeParams

WORKER_CLASS = "stages.serving.worker.DSparkWorker"


def read_drafter_config(package: Path) -> DrafterConfig:
    """The package's config.json. Raises ValueError naming the file when it is no DSpark drafter."""
    path = package / "config.json"
    try:
        return DrafterConfig.from_json(json.loads(path.read_text()))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe a DSpark drafter: {error!r}") from None


def read_temperatures(package: Path) -> list[float] | None:
    """Of the package's calibration.json, a slot each; None where it has none.

    Raises ValueError naming the file when it is not one.
    """
    path = package / contracts.CALIBRATION
    if not path.is_file():
        return None
    try:
        return [float(slot["temperature"]) for slot in json.loads(path.read_text())["slots"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no calibration of this pipeline: {error!r}") from None


def num_draft_tokens(package: Path, serve: ServeParams) -> int:
    """Slots of a block that are drafted. Raises ValueError for more than it has."""
    block_size = read_drafter_config(package).block_size
    number = serve.num_draft_tokens or block_size
    if number > block_size:
        raise ValueError(
            f"serve.num_draft_tokens must be in 1..{block_size} (block_size of {package}), "
            f"found {number}"
        )
    return number


def speculative_settings(package: Path, *, serve: ServeParams, device: str) -> dict[str, Any]:
    """Engine arguments (vllm.LLM's keyword arguments) that add the packaged drafter.

    On CUDA, Model Runner V2 has the method `dspark`, whose adaptive verification stands for the
    prefix scheduler. CPU has V1 alone, whose `dflash` method serves the package through our
    proposer, put in place by the worker class and told its policy by the additional config.
    Raises ValueError for what a device cannot do, or more draft tokens than the block has.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, found {device!r}")
    speculative: dict[str, Any] = {
        "method": "dspark" if device == "cuda" else "dflash",
        "model": str(package),
        "num_speculative_tokens": num_draft_tokens(package, serve),
        "draft_sample_method": serve.draft_sampling,
    }
    if device == "cuda":
        if serve.scheduler not in ("prefix", "fixed"):
            raise ValueError(
                f"serve.scheduler {serve.scheduler}: vLLM's own method dspark has no such rule; "
                "expected prefix or fixed on CUDA"
            )
        speculative["enable_adaptive_verification"] = serve.scheduler == "prefix"
        return {"speculative_config": speculative}
    policy = {"scheduler": serve.scheduler, "threshold": serve.threshold}
    return {
        "speculative_config": speculative,
        "worker_cls": WORKER_CLASS,
        "additional_config": {"dspark": policy},
    }


def speculative_arguments(package: Path, *, serve: ServeParams, device: str) -> list[str]:
    """The same as flags of vLLM's API server."""
    settings = speculative_settings(package, serve=serve, device=device)
    arguments = []
    for name, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value)
        arguments += [f"--{name.replace('_', '-')}", text]
    return arguments
