"""Starts vLLM and the Mooncake master, waits until they answer, and never leaves one behind.

A server belongs to an owner: to the stage that started it, or, where the environment names a
flow's FIFO (DSPARK_OWNER), to that flow, so that `extract` finds the server that `generate`
started. A supervisor process holds it (supervisor.py) and ends it when the owner is gone.
A warm eager vLLM server takes about 20 s to start, the master half a second.

Imports neither vllm nor mooncake: flows may import this module.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stages.params import EngineParams, ExtractParams, GenerateParams, Services
from stages.serving import process

MANAGED = "managed"
OWNER = "DSPARK_OWNER"
LAYER_IDS = "DSPARK_LAYER_IDS"
_PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Endpoint:
    """A server that answers. `log` is None for a given one; `master` is Mooncake's host:port."""

    url: str
    model: str
    log: Path | None
    master: str | None


@contextmanager
def vllm_server(
    *,
    role: str,
    model: Path,
    engine: EngineParams,
    services: Services,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Endpoint]:
    """A vLLM server for `model` that ends with the block; its log is run/logs/<role>.log.

    `arguments` and `environment` are added last and so win. Raises process.StartError, which
    quotes the log, when it does not answer within vllm.start_timeout_s.
    """
    plan = _vllm_plan(
        model, engine=engine, services=services, arguments=arguments, environment=environment or {}
    )
    with process.held(role, plan, owner=None) as service:
        yield _endpoint(service, model=plan.name, master=None)


@contextmanager
def generate_server(
    *, target: Path, engine: EngineParams, generate: GenerateParams, services: Services
) -> Iterator[Endpoint]:
    """The server that writes responses, seeded with generate.seed; or the given endpoint.

    Inside a flow that named the planes to extract it is already the extract server, which the
    next stage finds running.
    """
    if services.vllm.endpoint != MANAGED:
        yield _given(services.vllm.endpoint, services=services, master=None)
        return
    layer_ids = os.environ.get(LAYER_IDS)
    with ExitStack() as stack:
        master = None
        if os.environ.get(OWNER) and layer_ids:
            master = stack.enter_context(mooncake_master(services))
        plan = _target_plan(
            target,
            engine=engine,
            services=services,
            layer_ids=json.loads(layer_ids) if master and layer_ids else None,
            master=master,
            seed=generate.seed,
        )
        service = stack.enter_context(process.held("target", plan, owner=os.environ.get(OWNER)))
        yield _endpoint(service, model=plan.name, master=master)


@contextmanager
def extract_server(
    *, target: Path, engine: EngineParams, extract: ExtractParams, services: Services
) -> Iterator[Endpoint]:
    """A vLLM server that publishes hidden states to a Mooncake master; or the given ones.

    `services.vllm.endpoint` must then run stages.serving.connector against mooncake.master.
    """
    with ExitStack() as stack:
        if services.mooncake.master != MANAGED:
            master = services.mooncake.master
        elif services.vllm.endpoint != MANAGED:
            raise ValueError(
                "services.yaml: vllm.endpoint is given but mooncake.master is managed; name the "
                "master (host:port) that the given server publishes to"
            )
        else:
            master = stack.enter_context(mooncake_master(services))
        if services.vllm.endpoint != MANAGED:
            yield _given(services.vllm.endpoint, services=services, master=master)
            return
        plan = _target_plan(
            target,
            engine=engine,
            services=services,
            layer_ids=extract.layer_ids,
            master=master,
            seed=None,
        )
        service = stack.enter_context(process.held("target", plan, owner=os.environ.get(OWNER)))
        yield _endpoint(service, model=plan.name, master=master)


class Owner:
    """A flow's hold on the services that its stages start. Made by owned_services()."""

    def __init__(self, fifo: Path, *, layer_ids: Sequence[int] | None) -> None:
        self.environment: dict[str, str] = {OWNER: str(fifo)}
        if layer_ids is not None:
            self.environment[LAYER_IDS] = json.dumps(list(layer_ids))

    def stop(self, role: str | None = None) -> None:
        """Ends the service of that role (target, mooncake), or all of them, and waits for it."""
        process.stop(self.environment[OWNER], role=role)


@contextmanager
def owned_services(*, layer_ids: Sequence[int] | None = None) -> Iterator[Owner]:
    """Lets child stages start services that outlive them, up to the end of this block.

    Pass `.environment` to the stages. With `layer_ids` (extract.layer_ids), generate starts the
    server that extract needs as well. However this process dies, the services end with it.
    """
    folder = process.services_folder()
    fifo = folder / f"owner-{os.getpid()}.fifo"
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    # Read-write: opening a FIFO for writing alone would wait for a reader.
    writer = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
    owner = Owner(fifo, layer_ids=layer_ids)
    try:
        yield owner
    finally:
        owner.stop()
        os.close(writer)
        fifo.unlink(missing_ok=True)


def _target_plan(
    target: Path,
    *,
    engine: EngineParams,
    services: Services,
    layer_ids: Sequence[int] | None,
    master: str | None,
    seed: int | None,
) -> process.Plan:
    # On CPU a server that extracts what it generated finds keys, values and states of all but the
    # last tokens in its cache (extract.kv_cache_gib) instead of computing them once more. Elsewhere
    # vLLM's own proposer caches no states near max_model_len (states_worker.py).
    arguments = ["--enable-prefix-caching" if on_cpu() else "--no-enable-prefix-caching"]
    if layer_ids is not None and master is not None:
        arguments += extract_arguments(
            target, layer_ids=layer_ids, master=master, services=services
        )
        settings = services.vllm.model_copy(update={"kv_cache_gib": services.extract.kv_cache_gib})
        services = services.model_copy(update={"vllm": settings})
    return _vllm_plan(
        target, engine=engine, services=services, arguments=arguments, environment={}, seed=seed
    )


def extract_arguments(
    target: Path, *, layer_ids: Sequence[int], master: str, services: Services
) -> list[str]:
    """vLLM's arguments that make a server publish `layer_ids` and the last plane to `master`.

    Raises ValueError where an id is not below the target's number of layers.
    """
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


def _vllm_plan(
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


@contextmanager
def mooncake_master(services: Services) -> Iterator[str]:
    """A managed Mooncake master; yields its host:port."""
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the package mooncake is not installed; run `make setup`")
    plan = process.Plan(
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
    with process.held("mooncake", plan, owner=os.environ.get(OWNER)) as service:
        yield f"{service.host}:{service.port}"


def _endpoint(service: process.Service, *, model: str, master: str | None) -> Endpoint:
    return Endpoint(
        url=f"http://{service.host}:{service.port}",
        model=model,
        log=Path(service.log),
        master=master,
    )


def _given(url: str, *, services: Services, master: str | None) -> Endpoint:
    """An endpoint that somebody else runs: its first model, or a ValueError that it is dead."""
    answer: dict[str, Any] = process.get_json(
        url.rstrip("/") + "/v1/models", timeout_s=min(30.0, services.vllm.request_timeout_s)
    )
    return Endpoint(url=url.rstrip("/"), model=answer["data"][0]["id"], log=None, master=master)
