"""The client against a wire that misbehaves, and the bound on requests in flight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from stages.serving.client import (
    Client,
    Completion,
    EndpointError,
    RequestRefused,
    SpeculativeMetrics,
    run_bounded,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ANSWER = {
    "choices": [{"token_ids": [5, 6], "finish_reason": "stop"}],
    "kv_transfer_params": {"states_key": "k"},
}


def ask(handler: Handler, *, stream: bool = False, timeout_s: float = 10.0) -> Completion:
    """One completion from a real HTTP server with this handler."""

    async def run() -> Completion:
        application = web.Application()
        application.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            async with Client(f"http://{host}:{port}", model="m", timeout_s=timeout_s) as client:
                return await client.complete([1, 2], max_tokens=3, temperature=0.0, stream=stream)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_a_dropped_connection_is_tried_once_more() -> None:
    calls = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(ANSWER)

    completion = ask(handler)
    assert calls == 2
    assert completion.token_ids == [5, 6]
    assert completion.kv_transfer_params == {"states_key": "k"}


def test_an_endpoint_that_keeps_dropping_is_an_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    with pytest.raises(EndpointError, match="broke off twice"):
        ask(handler)


def test_a_refusal_is_told_from_a_failure() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, text="prompt too long")

    async def fail(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="engine dead")

    with pytest.raises(RequestRefused, match="400: prompt too long"):
        ask(refuse)
    with pytest.raises(EndpointError, match="500: engine dead") as failure:
        ask(fail)
    assert not isinstance(failure.value, RequestRefused)


def test_no_answer_in_time_is_an_error_that_names_the_setting() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.json_response(ANSWER)

    with pytest.raises(EndpointError, match="request_timeout_s"):
        ask(handler, timeout_s=0.2)


def test_every_token_of_a_stream_has_its_arrival_time() -> None:
    chunks = [
        {"choices": [{"token_ids": [7], "finish_reason": None}]},
        {"choices": [{"token_ids": [8, 9, 10], "finish_reason": None}]},
        {"choices": [{"token_ids": [2], "finish_reason": "stop"}]},
        {
            "choices": [],
            "metrics": {
                "speculative_decoding": {"per_step_drafted": [4, 4], "per_step_accepted": [2, 0]}
            },
        },
    ]

    async def handler(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["return_token_ids"]
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(0.02)
        await response.write(b"data: [DONE]\n\n")
        return response

    completion = ask(handler, stream=True)
    assert completion.token_ids == [7, 8, 9, 10, 2]
    assert completion.finish_reason == "stop"
    times = completion.token_times_s
    assert len(times) == 5
    assert times[1] == times[2] == times[3]
    assert times == sorted(times)
    assert completion.speculative == SpeculativeMetrics(drafted=(4, 4), accepted=(2, 0))


def test_a_stream_that_breaks_off_is_an_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        chunk = {"choices": [{"token_ids": [7], "finish_reason": None}]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        return response

    with pytest.raises(EndpointError, match="without a finish reason"):
        ask(handler, stream=True)


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_never_more_in_flight_than_the_bound_and_every_item_once(concurrency: int) -> None:
    running = most = 0

    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (item % 3))
        running -= 1
        return item * item

    async def collect() -> dict[int, int]:
        return {
            item: result
            async for item, result in run_bounded(range(20), work, concurrency=concurrency)
        }

    assert asyncio.run(collect()) == {item: item * item for item in range(20)}
    assert most == min(concurrency, 20)


def test_the_first_failure_cancels_the_rest() -> None:
    cancelled: list[int] = []

    async def work(item: int) -> int:
        if item == 0:
            raise EndpointError("gone")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return item

    async def drain() -> None:
        async for _ in run_bounded(range(10), work, concurrency=4):
            pass

    with pytest.raises(EndpointError, match="gone"):
        asyncio.run(drain())
    assert cancelled == [1, 2, 3]
