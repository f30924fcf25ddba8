"""Several vLLM endpoints as one: the least loaded is asked, a dead one is passed over.

Load is tokens in flight (prompt and wanted ones), so a slow endpoint gets less by itself. A request
whose endpoint breaks off or times out is sent again, elsewhere or there once it answers again; no
request is lost. Where none answers for `outage_s` seconds the pool gives up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from stages.services import VllmServices
from stages.serving.client import Client, Completion, EndpointError, RequestRefused
from stages.serving.launch import Endpoint

_PROBE_S = 1.0
_TRIES = 5  # of one request, an endpoint: beyond, an endpoint that answers cannot answer this


@dataclass
class _Member:
    endpoint: Endpoint
    client: Client
    tokens: int = 0  # in flight
    down: EndpointError | None = None  # why it is passed over
    served: int = 0


@dataclass
class Pool:
    """`async with Pool.of(endpoints, services.vllm) as pool: await pool.complete(...)`."""

    endpoints: Sequence[Endpoint]
    timeout_s: float
    outage_s: float
    _members: list[_Member] = field(default_factory=list)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _silent_since: float | None = None  # monotonic time since which none answers
    _reviver: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, endpoints: Sequence[Endpoint], vllm: VllmServices) -> Pool:
        return cls(endpoints, timeout_s=vllm.request_timeout_s, outage_s=vllm.outage_s)

    async def __aenter__(self) -> Pool:
        for endpoint in self.endpoints:
            client = Client(endpoint.url, model=endpoint.model, timeout_s=self.timeout_s)
            await self._stack.enter_async_context(client)
            self._members.append(_Member(endpoint, client))
        self._reviver = asyncio.create_task(self._revive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._reviver is not None:
            self._reviver.cancel()
        await self._stack.aclose()

    @property
    def served(self) -> dict[str, int]:
        """Answered requests by endpoint."""
        return {member.endpoint.url: member.served for member in self._members}

    async def complete(
        self, prompt: Sequence[int], *, max_tokens: int, **options: Any
    ) -> Completion:
        """Client.complete on one of the endpoints. Raises RequestRefused, or EndpointError where
        none answers any more."""
        tokens = len(prompt) + max_tokens
        for tries_left in reversed(range(_TRIES * len(self._members))):
            member = await self._least_loaded()
            member.tokens += tokens
            try:
                completion = await member.client.complete(prompt, max_tokens=max_tokens, **options)
            except RequestRefused:
                raise
            except EndpointError as error:
                if not tries_left:
                    raise
                self._pass_over(member, error)
            else:
                member.served += 1
                return completion
            finally:
                member.tokens -= tokens
        raise AssertionError("unreachable")

    def _pass_over(self, member: _Member, error: EndpointError) -> None:
        if member.down is None:
            print(f"{error}; its requests go elsewhere or wait for it", flush=True)
        member.down = error
        if self._silent_since is None and all(m.down is not None for m in self._members):
            self._silent_since = time.monotonic()

    async def _least_loaded(self) -> _Member:
        """The one to ask; waits for the first to answer again where all are down."""
        while True:
            up = [member for member in self._members if member.down is None]
            if up:
                return min(up, key=lambda member: member.tokens)
            assert self._silent_since is not None
            silent_s = time.monotonic() - self._silent_since
            if silent_s > self.outage_s:
                reasons = "; ".join(str(member.down) for member in self._members)
                raise EndpointError(
                    f"no vLLM server answered for {silent_s:.0f} s (vllm.outage_s): {reasons}"
                )
            await asyncio.sleep(_PROBE_S / 2)

    async def _revive(self) -> None:
        """Looks every second whether those that are down answer again."""
        while True:
            await asyncio.sleep(_PROBE_S)
            down = [member for member in self._members if member.down is not None]
            await asyncio.gather(*(self._probe(member) for member in down))

    async def _probe(self, member: _Member) -> None:
        if await member.client.healthy():
            print(f"the vLLM server at {member.endpoint.url} answers again", flush=True)
            member.down = self._silent_since = None
