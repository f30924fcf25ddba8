"""The losslessness gate: greedy float32 output with the drafter equals the output without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages import contracts
from stages.evaluate.prompts import Prompt
from stages.params import EngineParams, ServeParams, Services
from stages.serving.plans import vllm_environment

MODES = ("batch_1", "batch_all")


def check(
    path: Path,
    prompts: Sequence[Prompt],
    *,
    target: Path,
    package: Path,
    engine: EngineParams,
    services: Services,
    max_tokens: int,
    serve: ServeParams,
) -> dict[str, int]:
    """judge()'s verdict on what `path` holds, or on `prompts` decoded now.

    It is kept there only once it passed: a failure must not outlive the fault that caused it.
    """
    if path.is_file():
        decoded = json.loads(path.read_text())
        return judge(decoded, ids=decoded["ids"])
    decoded = decode(
        prompts,
        target=target,
        package=package,
        engine=engine,
        services=services,
        max_tokens=max_tokens,
        serve=serve,
    )
    ids = [prompt.id for prompt in prompts]
    verdict = judge(decoded, ids=ids)
    contracts.write_json(path, {"ids": ids, **decoded})
    return verdict


def decode(
    prompts: Sequence[Prompt],
    *,
    target: Path,
    package: Path,
    engine: EngineParams,
    services: Services,
    max_tokens: int,
    serve: ServeParams,
) -> dict[str, Any]:
    """stages.serving.offline's result for `prompts`, from a process of its own.

    Raises ValueError with the end of that process's output when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="lossless-") as folder:
        given, out = Path(folder, "prompts.json"), Path(folder, "out.json")
        given.write_text(json.dumps([prompt.token_ids for prompt in prompts]))
        options = {
            "target": target.resolve(),
            "package": package.resolve(),
            "prompts": given,
            "out": out,
            "max-tokens": max_tokens,
            "max-model-len": engine.max_model_len,
            "kv-block-size": engine.kv_block_size,
            "serve": serve.model_dump_json(),
            "kv-cache-bytes": int(services.vllm.kv_cache_gib * 2**30),
        }
        command = [sys.executable, "-m", "stages.serving.offline"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        environment = {**os.environ, **vllm_environment(services)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        finished = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if finished.returncode:
            tail = "\n".join(finished.stdout.splitlines()[-20:])
            raise ValueError(f"evaluate: the float32 losslessness run failed:\n{tail}")
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def judge(decoded: dict[str, Any], *, ids: Sequence[str]) -> dict[str, int]:
    """{"checked", "identical"}: prompts whose output is the same in every mode.

    Raises ValueError at the first difference, and when no draft was made: then nothing was tested.
    """
    for index, name in enumerate(ids):
        plain = decoded["plain"][index]
        for mode in MODES:
            drafted = decoded[mode][index]
            if drafted != plain:
                at = next(
                    (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b),
                    min(len(plain), len(drafted)),
                )
                raise ValueError(
                    f"evaluate: the drafter changes the target's output ({mode}, prompt {name}): "
                    f"response token {at} is {drafted[at : at + 1] or 'missing'}, without the "
                    f"drafter {plain[at : at + 1] or 'missing'} (greedy, float32)"
                )
    if not decoded["num_drafts"]:
        raise ValueError("evaluate: the losslessness run made no draft, so it tested nothing")
    return {"checked": len(ids), "identical": len(ids)}
