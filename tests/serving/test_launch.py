"""Several managed servers: their names, devices, and what happens when one does not start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stages.params import Params, Services
from stages.serving import launch, process
from stages.serving.process import Plan, Service, StartError

Start = Callable[[str, Plan], None]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Plan], list[str]]:
    """What was started by role, and what ended. `mooncake` starts too."""
    started: dict[str, Plan] = {}
    ended: list[str] = []

    @contextmanager
    def hold(role: str, plan: Plan, *, owner: str | None) -> Iterator[Service]:
        if plan.environment.get("CUDA_VISIBLE_DEVICES") == "broken":
            raise StartError(f"the {role} server ended with status 1")
        started[role] = plan
        try:
            yield Service(role, "127.0.0.1", 7000 + len(started), "log", 0, "", "", "", [])
        finally:
            ended.append(role)

    monkeypatch.setattr(process, "held", hold)
    monkeypatch.setattr(
        launch.plans, "target_plan", lambda *_, **__: Plan("t", [], [], [], {}, "", None, 1.0)
    )
    return started, ended


def with_servers(services: Services, devices: list[str]) -> Services:
    vllm = services.vllm.model_copy(update={"num_servers": len(devices), "devices": devices})
    return services.model_copy(update={"vllm": vllm})


def test_each_server_has_its_own_devices_and_all_end_with_the_block(
    held: tuple[dict[str, Plan], list[str]], params: Params, services: Services
) -> None:
    started, ended = held
    with launch.extract_servers(
        target=Path("target"),
        engine=params.engine,
        extract=params.extract,
        services=with_servers(services, ["0", "1,2"]),
    ) as endpoints:
        assert len({endpoint.url for endpoint in endpoints}) == 2
        assert len({endpoint.master for endpoint in endpoints}) == 1
        devices = {r: p.environment.get("CUDA_VISIBLE_DEVICES") for r, p in started.items()}
        assert devices == {"mooncake": None, "target-0": "0", "target-1": "1,2"}
        assert not ended
    assert sorted(ended) == ["mooncake", "target-0", "target-1"]


def test_one_that_does_not_start_ends_the_others(
    held: tuple[dict[str, Plan], list[str]], params: Params, services: Services
) -> None:
    started, ended = held
    with (
        pytest.raises(StartError, match="target-1"),
        launch.extract_servers(
            target=Path("target"),
            engine=params.engine,
            extract=params.extract,
            services=with_servers(services, ["0", "broken", "2"]),
        ),
    ):
        pass
    assert sorted(started) == sorted(ended) == ["mooncake", "target-0", "target-2"]


def test_devices_must_name_as_many_servers(services: Services) -> None:
    values = services.vllm.model_dump() | {"num_servers": 2, "devices": ["0"]}
    with pytest.raises(ValueError, match=r"devices names those of 1 servers, num_servers is 2"):
        type(services.vllm).model_validate(values)
