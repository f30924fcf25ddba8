"""Hidden states in a Mooncake store: the only module that imports mooncake.

Contract. A producer lends the store `segment_bytes` of memory and publishes objects with put();
a consumer lends nothing (an owner of a segment takes its objects along when it dies) and reads
them with get_into() into its own registered buffer. An object appears whole or not at all. Keys
are used once: a second put of a key would keep the OLD value and report success. Objects are hard
pinned: a full store refuses new ones (StoreFull) and loses none, so whoever reads must remove().

A call into a dead peer can block for a minute, so each runs in a thread with a limit. After that
the store object is unusable (StoreTimeout): the thread inside cannot be ended.

Cost: 2-4 GB/s to put from a registered buffer, about 0.4 GB/s to get over TCP on loopback.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stages.services import MooncakeServices

_MISSING, _NOT_FINISHED, _LEASE_EXPIRED = -704, -703, -707
_NO_SPACE, _TOO_LARGE = -200, -600
_TRANSFER_FAILED = -800
_MASTER_GONE = (-900, -901)
_RETRY_S = 0.02


class StoreError(ValueError):
    """The store failed; `code` is Mooncake's. Subclasses say what to do about it."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(f"{message} (Mooncake code {code})")
        self.code = code


class ObjectMissing(StoreError):
    """No such object: never published, removed, or gone with its producer. Ask for it again."""


class StoreFull(StoreError):
    """No space (a reader has to remove objects), or the object is larger than the segment."""


class StoreUnreachable(StoreError):
    """The master does not answer: objects published before are lost, even once it is back."""


class StoreTimeout(StoreError):
    """A call did not return within the limit; this store object must not be used any more."""


@dataclass(frozen=True)
class StoreSettings:
    """How to reach a store. `segment_bytes` is 0 for a consumer."""

    master: str  # host:port
    host: str  # this side's address, reachable for the other
    protocol: str
    device: str
    segment_bytes: int
    local_buffer_bytes: int
    call_timeout_s: float

    @classmethod
    def of(
        cls, mooncake: MooncakeServices, *, master: str, host: str, segment_bytes: int = 0
    ) -> StoreSettings:
        return cls(
            master=master,
            host=host,
            protocol=mooncake.protocol,
            device=mooncake.device,
            segment_bytes=segment_bytes,
            local_buffer_bytes=mooncake.local_buffer_mib * 2**20,
            call_timeout_s=mooncake.call_timeout_s,
        )


class Store:
    """A connection to a Mooncake store. Not for use from several threads at once."""

    def __init__(self, settings: StoreSettings) -> None:
        """Connects. Raises StoreUnreachable, or ValueError where mooncake cannot be loaded."""
        _check_reachable(settings.master)
        # Its library writes two pages about itself to stderr unless told before it is loaded.
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise ValueError(
                f"mooncake cannot be loaded: {error}; it needs the system libraries libibverbs1, "
                "librdmacm1 and libnuma1"
            ) from None
        self._settings = settings
        self._store: Any = MooncakeDistributedStore()
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._dead = False
        self._buffers: list[int] = []
        code = self._call(
            "setup",
            lambda: self._store.setup(
                settings.host,
                "P2PHANDSHAKE",
                settings.segment_bytes,
                settings.local_buffer_bytes,
                settings.protocol,
                settings.device,
                settings.master,
            ),
        )
        if code == _TOO_LARGE:
            raise StoreError(
                f"Mooncake does not take a segment of {settings.segment_bytes:,} bytes", code=code
            )
        if code != 0:
            raise StoreUnreachable(f"no Mooncake master answers at {settings.master}", code=code)

    def register(self, address: int, size: int) -> None:
        """Registers memory that put() and get_into() use. It must outlive the store."""
        code = self._call("register_buffer", lambda: self._store.register_buffer(address, size))
        if code != 0:
            raise StoreError(f"cannot register a buffer of {size} bytes", code=code)
        self._buffers.append(address)

    def put(self, key: str, address: int, size: int, *, wait_s: float = 0.0) -> None:
        """Publishes `size` bytes at `address` (registered memory) under a key never used before.

        A full store is tried again for `wait_s`. Raises StoreFull, StoreUnreachable, StoreTimeout.
        """
        deadline = time.monotonic() + wait_s
        while True:
            code = self._call(
                "put_from", lambda: self._store.put_from(key, address, size, self._pinned)
            )
            if code == 0:
                return
            if code != _NO_SPACE or time.monotonic() >= deadline:
                raise self._failure(f"cannot publish {key} ({size} bytes)", code)
            time.sleep(_RETRY_S)

    def get_into(self, key: str, address: int, size: int, *, wait_s: float = 0.0) -> int:
        """Reads an object into registered memory of `size` bytes; returns the object's length.

        An object that is not there (yet) is tried again for `wait_s`. Raises ObjectMissing (also
        where its producer died), StoreUnreachable, StoreTimeout.
        """
        deadline = time.monotonic() + wait_s
        while True:
            code = self._call("get_into", lambda: self._store.get_into(key, address, size))
            if code >= 0:
                return code
            if code not in (_MISSING, _NOT_FINISHED) or time.monotonic() >= deadline:
                raise self._failure(f"cannot read {key}", code)
            time.sleep(_RETRY_S)

    def exists(self, key: str) -> bool:
        """True also for up to 11 s after an object's producer died."""
        code = self._call("is_exist", lambda: self._store.is_exist(key))
        if code < 0:
            raise self._failure(f"cannot look up {key}", code)
        return code == 1

    def remove(self, key: str) -> bool:
        """Removes an object, lease or not; False where there was none."""
        code = self._call("remove", lambda: self._store.remove(key, True))
        if code == 0:
            return True
        if code in (_MISSING, _NOT_FINISHED):
            return False
        raise self._failure(f"cannot remove {key}", code)

    def remove_prefix(self, prefix: str) -> int:
        """Removes every object whose key starts with `prefix` (letters, digits and dashes)."""
        count = self._call(
            "remove_by_regex", lambda: self._store.remove_by_regex(f"^{prefix}.*", True)
        )
        if count < 0:
            raise self._failure(f"cannot remove {prefix}*", count)
        return count

    def close(self) -> None:
        """Disconnects, which takes 2 s; does nothing after a StoreTimeout."""
        if not self._dead:
            for address in self._buffers:
                self._call(
                    "unregister_buffer", functools.partial(self._store.unregister_buffer, address)
                )
            self._call("close", self._store.close)
            self._dead = True

    def _failure(self, what: str, code: int) -> StoreError:
        if code in (_MISSING, _NOT_FINISHED, _LEASE_EXPIRED, _TRANSFER_FAILED):
            return ObjectMissing(
                f"{what}: it is gone, was never published, or was not sent in time", code=code
            )
        if code in (_NO_SPACE, _TOO_LARGE):
            return StoreFull(
                f"{what}: the store is full; a reader is slow or dead, or "
                "extract.in_flight_mib (services.yaml) is too small",
                code=code,
            )
        if code in _MASTER_GONE:
            return StoreUnreachable(
                f"{what}: the master at {self._settings.master} is gone", code=code
            )
        return StoreError(what, code=code)

    def _call(self, name: str, call: Callable[[], int | None]) -> int:
        if self._dead:
            raise StoreTimeout(f"{name} on a store that hung or was closed", code=0)
        result: Future[int] = Future()

        def target() -> None:
            try:
                result.set_result(int(call() or 0))
            except BaseException as error:
                result.set_exception(error)

        # A daemon: it may hang for ever and must not keep the process.
        threading.Thread(target=target, name=f"mooncake-{name}", daemon=True).start()
        try:
            return result.result(timeout=self._settings.call_timeout_s)
        except TimeoutError:
            self._dead = True
            raise StoreTimeout(
                f"{name} did not return within {self._settings.call_timeout_s:.0f} s "
                "(mooncake.call_timeout_s); the store is dead",
                code=0,
            ) from None


def _check_reachable(master: str) -> None:
    """Raises StoreUnreachable at once; Mooncake itself would try for a minute and a half."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"mooncake.master: expected host:port, found {master!r}")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise StoreUnreachable(
            f"no Mooncake master answers at {master}: {error}", code=_MASTER_GONE[0]
        ) from None
