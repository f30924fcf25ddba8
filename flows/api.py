"""A Prefect API for one process: `make retrain` needs no server set up by hand.

Prefect's own temporary server is a child process that outlives a killed parent and takes about 14 s
to start. This one is a thread, up in about 4 s (10 s the first time), and cannot be left behind.
Its database is the one of `make serve-flows`, so runs of both kinds are listed there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

START_TIMEOUT_S = 120.0


@contextmanager
def in_process() -> Iterator[None]:
    """Serves Prefect's API on a free loopback port for the block.

    Does nothing where PREFECT_API_URL names a server. Raises RuntimeError when it does not start.
    """
    if os.environ.get("PREFECT_API_URL"):
        yield
        return
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    PREFECT_HOME.value().mkdir(parents=True, exist_ok=True)
    config = uvicorn.Config(
        create_app(final=True, ephemeral=True),
        host="127.0.0.1",
        port=0,
        log_level="critical",
        lifespan="on",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True, name="prefect-api")
    thread.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError(
                f"Prefect's API did not start within {START_TIMEOUT_S:.0f} s on loopback; its "
                f"database is {PREFECT_HOME.value()}/prefect.db"
            )
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}):
            yield
    finally:
        server.should_exit = True
        thread.join(timeout=10)
