"""Several endpoints as one: balance, dead ones, and giving up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from stages.serving import pool as pool_module
from stages.serving.client import EndpointError, RequestRefused
from stages.serving.launch import Endpoint
from stages.serving.pool import Pool


class FakeServer:
    """Answers completions with the port, after `delay_s`, or with `status`."""

    def __init__(self, *, delay_s: float = 0.0, status: int = 200) -> None:
        self.delay_s, self.status = delay_s, status
        self.asked = 0
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> Endpoint:
        application = web.Application()
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_get("/health", self._health)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        return Endpoint(f"http://127.0.0.1:{self.port}", "fake", None, None)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        choice = {"token_ids": [self.port], "finish_reason": "length"}
        return web.json_response({"choices": [choice]})


@asynccontextmanager
async def serving(*servers: FakeServer, outage_s: float = 20.0) -> Any:
    async with AsyncExitStack() as stack:
        endpoints = []
        for server in servers:
            endpoints.append(await server.start())
            stack.push_async_callback(server.stop)
        yield await stack.enter_async_context(Pool(endpoints, timeout_s=10.0, outage_s=outage_s))


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


async def ask(pool: Pool, *, tokens: int = 10) -> int:
    return (await pool.complete([5] * tokens, max_tokens=1, temperature=0.0)).token_ids[0]


def test_a_slow_server_gets_less_and_nothing_is_lost() -> None:
    async def test() -> None:
        fast, slow = FakeServer(delay_s=0.01), FakeServer(delay_s=0.3)
        waiting = asyncio.Semaphore(4)

        async def one() -> int:
            async with waiting:
                return await ask(pool)

        async with serving(fast, slow) as pool:
            answers = await asyncio.gather(*(one() for _ in range(60)))
            assert set(answers) <= {fast.port, slow.port}
            assert fast.asked + slow.asked == 60
            assert fast.asked > 2 * slow.asked
            assert sum(pool.served.values()) == 60

    run(test)


def test_tokens_in_flight_decide_and_not_requests() -> None:
    async def test() -> None:
        first, second = FakeServer(delay_s=0.2), FakeServer(delay_s=0.2)
        async with serving(first, second) as pool:
            long = asyncio.create_task(ask(pool, tokens=1000))
            await asyncio.sleep(0.02)
            short = await asyncio.gather(*(ask(pool, tokens=10) for _ in range(5)))
            assert set(short) == {second.port if await long == first.port else first.port}

    run(test)


def test_a_server_that_dies_is_passed_over_and_used_again_when_it_is_back() -> None:
    async def test() -> None:
        first, second = FakeServer(), FakeServer()
        async with serving(first, second) as pool:
            await first.stop()
            assert {await ask(pool) for _ in range(5)} == {second.port}
            await first.start()
            deadline = asyncio.get_running_loop().time() + 20
            while first.asked == 0 and asyncio.get_running_loop().time() < deadline:
                await asyncio.gather(ask(pool), ask(pool), ask(pool))
                await asyncio.sleep(0.05)
            assert first.asked

    run(test)


def test_a_request_waits_for_the_only_server_to_come_back() -> None:
    async def test() -> None:
        server = FakeServer()
        async with serving(server) as pool:
            await server.stop()
            asked = asyncio.create_task(ask(pool))
            await asyncio.sleep(0.5)
            assert not asked.done()
            await server.start()
            assert await asked == server.port

    run(test)


def test_it_gives_up_after_the_outage_and_names_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "_PROBE_S", 0.05)

    async def test() -> None:
        first, second = FakeServer(), FakeServer()
        async with serving(first, second, outage_s=0.3) as pool:
            await first.stop()
            await second.stop()
            with pytest.raises(EndpointError, match=r"no vLLM server answered for .* s") as raised:
                await ask(pool)
            assert str(first.port) in str(raised.value)
            assert str(second.port) in str(raised.value)

    run(test)


def test_a_refusal_is_the_requests_fault_and_an_eternal_500_ends() -> None:
    async def test() -> None:
        refusing, broken = FakeServer(status=400), FakeServer(status=500)
        async with serving(refusing) as pool:
            with pytest.raises(RequestRefused):
                await ask(pool)
            assert refusing.asked == 1
        async with serving(broken) as pool:
            with pytest.raises(EndpointError, match="HTTP 500"):
                await ask(pool)
            assert 1 < broken.asked < 20

    run(test)
