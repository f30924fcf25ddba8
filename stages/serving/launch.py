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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.params import EngineParams, ExtractParams, GenerateParams, Services
from stages.services import MANAGED
from stages.serving import plans, process

OWNER = "DSPARK_OWNER"
SERVICES_OWNER = "DSPARK_SERVICES_OWNER"
"""Set where OWNER is a torchrun's pipe: the flow whose services the ranks use."""
PLANES = "DSPARK_PLANES"
GIVEN_TIMEOUT_S = 30.0  # for a given server to say what it serves


@dataclass(frozen=True)
class Endpoint:
    """A server that answers. `master` is Mooncake's host:port; a given server has no `log`, and
    says its max_model_len or does not."""

    url: str
    model: str
    log: Path | None
    master: str | None
    max_model_len: int | None = None


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
    plan = plans.vllm_plan(
        model, engine=engine, services=services, arguments=arguments, environment=environment or {}
    )
    with process.held(role, plan, owner=None) as service:
        yield _endpoint(service, model=plan.name, master=None)


@contextmanager
def generate_servers(
    *, target: Path, engine: EngineParams, generate: GenerateParams, services: Services
) -> Iterator[list[Endpoint]]:
    """The servers that write responses, seeded with generate.seed; or the given endpoints.

    Inside a flow that named the planes to extract they are already the extract servers, which the
    next stage finds running.
    """
    with ExitStack() as stack:
        planes = master = None
        if services_owner() and PLANES in os.environ and services.vllm.managed:
            planes = plans.Planes(*json.loads(os.environ[PLANES]))
            master = _master(stack, services)
        yield _servers(
            stack,
            target=target,
            engine=engine,
            services=services,
            planes=planes,
            master=master,
            seed=generate.seed,
        )


@contextmanager
def extract_servers(
    *, target: Path, engine: EngineParams, extract: ExtractParams, services: Services
) -> Iterator[list[Endpoint]]:
    """vLLM servers that publish hidden states to one Mooncake master; or the given ones.

    Those of `services.vllm.endpoint` must run stages.serving.connector against mooncake.master.
    """
    if not services.vllm.managed and services.mooncake.master == MANAGED:
        raise ValueError(
            "services.yaml: vllm.endpoint is given but mooncake.master is managed; name the "
            "master (host:port) that the given server publishes to"
        )
    with ExitStack() as stack:
        master = _master(stack, services)
        yield _servers(
            stack,
            target=target,
            engine=engine,
            services=services,
            planes=plans.Planes.of(extract),
            master=master,
            seed=None,
        )


def services_owner() -> str | None:
    """The FIFO of the flow that this process belongs to."""
    owner = os.environ.get(SERVICES_OWNER, os.environ.get(OWNER))
    return None if owner in (None, "", "-") else owner


class Owner:
    """A flow's hold on the services that its stages start. Made by owned_services()."""

    def __init__(self, fifo: Path, *, extract: ExtractParams | None) -> None:
        self.environment: dict[str, str] = {OWNER: str(fifo)}
        if extract is not None:
            self.environment[PLANES] = json.dumps(plans.Planes.of(extract))

    def stop(self, role: str | None = None) -> None:
        """Ends the service of that role (target, mooncake), or all of them, and waits for it."""
        process.stop(self.environment[OWNER], role=role)


@contextmanager
def owned_services(*, extract: ExtractParams | None = None) -> Iterator[Owner]:
    """Lets child stages start services that outlive them, up to the end of this block.

    Pass `.environment` to the stages. With `extract`, generate starts the servers that
    extract needs as well. However this process dies, the services end with it.
    """
    folder = process.services_folder()
    fifo = folder / f"owner-{os.getpid()}.fifo"
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    # Read-write: opening a FIFO for writing alone would wait for a reader.
    writer = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
    owner = Owner(fifo, extract=extract)
    try:
        yield owner
    finally:
        owner.stop()
        os.close(writer)
        fifo.unlink(missing_ok=True)


@contextmanager
def mooncake_master(services: Services) -> Iterator[str]:
    """A managed Mooncake master; yields its host:port."""
    plan = plans.mooncake_plan(services)
    with process.held("mooncake", plan, owner=services_owner()) as service:
        yield f"{service.host}:{service.port}"


def _master(stack: ExitStack, services: Services) -> str:
    if services.mooncake.master != MANAGED:
        return services.mooncake.master
    return stack.enter_context(mooncake_master(services))


def _servers(
    stack: ExitStack,
    *,
    target: Path,
    engine: EngineParams,
    services: Services,
    planes: plans.Planes | None,
    master: str | None,
    seed: int | None,
) -> list[Endpoint]:
    """vllm.num_servers managed servers, started side by side, or the given ones."""
    if not services.vllm.managed:
        return [given_endpoint(url, master=master) for url in services.vllm.urls]
    plan = plans.target_plan(
        target, engine=engine, services=services, planes=planes, master=master, seed=seed
    )
    count, devices = services.vllm.num_servers, services.vllm.devices
    owner = services_owner()

    def start(index: int) -> tuple[Any, process.Service]:
        own = plan.on_devices(devices[index]) if devices else plan
        holding = process.held("target" if count == 1 else f"target-{index}", own, owner=owner)
        return holding, holding.__enter__()

    with ThreadPoolExecutor(count) as threads:
        starting = [threads.submit(start, index) for index in range(count)]
    for one in starting:
        if one.exception() is None:
            stack.push(one.result()[0])
    return [_endpoint(one.result()[1], model=plan.name, master=master) for one in starting]


def _endpoint(service: process.Service, *, model: str, master: str | None) -> Endpoint:
    return Endpoint(
        url=f"http://{service.host}:{service.port}",
        model=model,
        log=Path(service.log),
        master=master,
    )


def given_endpoint(url: str, *, master: str | None = None) -> Endpoint:
    """A server that somebody else runs, and its first model.

    Raises ValueError where it does not answer or serves none.
    """
    url = url.rstrip("/")
    models = process.get_json(f"{url}/v1/models", timeout_s=GIVEN_TIMEOUT_S).get("data")
    if not models:
        raise ValueError(f"{url} (services.yaml) names no model at /v1/models: is it vLLM's?")
    return Endpoint(
        url=url,
        model=models[0]["id"],
        log=None,
        master=master,
        max_model_len=models[0].get("max_model_len"),
    )
