"""An asynchronous client of vLLM's /v1/completions that speaks token ids both ways.

Prompts go in as ids and responses come back as ids: text is never tokenised twice. Cost: one HTTP
request a completion over kept-alive connections, one retry when the server dropped one.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

Item = TypeVar("Item")
Result = TypeVar("Result")

_HEALTH_S = 5.0


class EndpointError(ValueError):
    """The endpoint cannot be reached, broke off or answered with a server's error."""


class RequestRefused(EndpointError):
    """The endpoint refuses this request (HTTP 4xx); another one may be fine."""


@dataclass(frozen=True)
class SpeculativeMetrics:
    """Acceptance of one request, from a server with --per-request-spec-decode-metrics detailed.

    Step i proposed drafted[i] tokens, of which accepted[i] were accepted (bonus not counted).
    Steps that proposed nothing are not listed.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One response. Times are seconds since the request was sent, on the client's clock."""

    token_ids: list[int]
    finish_reason: str
    elapsed_s: float
    token_times_s: list[float]  # streaming: arrival of each token's chunk; else empty
    kv_transfer_params: dict[str, Any] | None
    speculative: SpeculativeMetrics | None


class Client:
    """A pool of connections to one endpoint: `async with Client(endpoint.url, ...) as client`.

    The key in VLLM_API_KEY is sent where that is set.
    """

    def __init__(self, url: str, *, model: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        key = os.environ.get("VLLM_API_KEY")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        stream: bool = False,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> Completion:
        """The response to a prompt of token ids.

        Every sampling setting is sent, so that nothing comes from the model's generation_config
        except its end-of-sequence ids. Raises RequestRefused or EndpointError.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        for attempt in (1, 2):
            try:
                return await self._send(body)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # A kept-alive connection that the server closed meanwhile looks like this.
                if attempt == 2:
                    raise self._failure(f"broke off twice: {error!r}") from None
            except aiohttp.ClientError as error:
                raise self._failure(repr(error)) from None
            except TimeoutError:
                raise self._failure(
                    f"did not answer in {self._timeout_s:.0f} s (vllm.request_timeout_s)"
                ) from None
        raise AssertionError("unreachable")

    async def healthy(self) -> bool:
        """Whether the endpoint's /health answers, within seconds."""
        try:
            await asyncio.wait_for(self._get("/health"), timeout=_HEALTH_S)
        except (EndpointError, TimeoutError):
            return False
        return True

    async def metrics(self) -> str:
        """The endpoint's /metrics page (Prometheus text)."""
        return await self._get("/metrics")

    async def call(self, method: str, *arguments: str) -> Any:
        """What a worker's method returns, from a server with VLLM_SERVER_DEV_MODE=1."""
        assert self._session is not None, "use `async with`"
        body = {"method": method, "args": arguments}
        try:
            async with self._session.post(f"{self._url}/collective_rpc", json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._failure(repr(error)) from None
        if response.status != 200:
            raise self._failure(f"/collective_rpc answered HTTP {response.status}: {text[:500]}")
        return json.loads(text)["results"][0]

    async def _get(self, path: str) -> str:
        assert self._session is not None, "use `async with`"
        try:
            async with self._session.get(self._url + path) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._failure(repr(error)) from None
        if response.status != 200:
            raise self._failure(f"{path} answered HTTP {response.status}: {text[:500]}")
        return text

    async def _send(self, body: dict[str, Any]) -> Completion:
        assert self._session is not None, "use `async with`"
        start = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                kind = RequestRefused if response.status < 500 else EndpointError
                raise kind(f"{self._url} answered HTTP {response.status}: {text}")
            if body["stream"]:
                return await self._read_stream(response, start=start)
            answer = await response.json()
        choice = answer["choices"][0]
        return Completion(
            token_ids=choice["token_ids"],
            finish_reason=choice["finish_reason"],
            elapsed_s=time.perf_counter() - start,
            token_times_s=[],
            kv_transfer_params=answer.get("kv_transfer_params"),
            speculative=_speculative(answer),
        )

    async def _read_stream(self, response: aiohttp.ClientResponse, *, start: float) -> Completion:
        tokens: list[int] = []
        times: list[float] = []
        finish_reason: str | None = None
        speculative: SpeculativeMetrics | None = None
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.perf_counter() - start
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise self._failure(f"ended a stream with {chunk['error']}")
            speculative = _speculative(chunk) or speculative
            for choice in chunk["choices"]:
                new = choice.get("token_ids") or []
                tokens += new
                times += [now] * len(new)
                finish_reason = choice.get("finish_reason") or finish_reason
        if finish_reason is None:
            raise self._failure("ended a stream without a finish reason")
        return Completion(
            token_ids=tokens,
            finish_reason=finish_reason,
            elapsed_s=time.perf_counter() - start,
            token_times_s=times,
            kv_transfer_params=None,
            speculative=speculative,
        )

    def _failure(self, what: str) -> EndpointError:
        return EndpointError(f"the vLLM server at {self._url} {what}; its log says more")


def _speculative(answer: dict[str, Any]) -> SpeculativeMetrics | None:
    body = (answer.get("metrics") or {}).get("speculative_decoding")
    if body is None:
        return None
    return SpeculativeMetrics(
        drafted=tuple(body.get("per_step_drafted") or ()),
        accepted=tuple(body.get("per_step_accepted") or ()),
    )


async def run_bounded(
    items: Iterable[Item],
    function: Callable[[Item], Awaitable[Result]],
    *,
    concurrency: int,
) -> AsyncIterator[tuple[Item, Result]]:
    """Runs function(item) for every item, at most `concurrency` at once.

    Yields (item, result) as they finish. The first exception cancels the rest and is raised.
    """
    waiting = iter(items)
    running: dict[asyncio.Task[Result], Item] = {}

    async def call(item: Item) -> Result:
        return await function(item)

    try:
        while True:
            while len(running) < concurrency:
                try:
                    item = next(waiting)
                except StopIteration:
                    break
                running[asyncio.create_task(call(item))] = item
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield running.pop(task), task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
