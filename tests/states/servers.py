"""A vLLM server and a Mooncake master on fixed ports, to be killed, stopped and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from stages.serving import process
from stages.serving.process import Plan, free_ports


class Server:
    """One process group on ports of its own; `with` ends it."""

    def __init__(self, plan: Plan, log: Path) -> None:
        self.plan, self.log = plan, log
        self.ports = free_ports(plan.host, count=len(plan.port_options))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def launch(self) -> None:
        command = list(self.plan.command)
        for option, port in zip(self.plan.port_options, self.ports, strict=True):
            command += [f"{option}{port}"] if option.endswith("=") else [option, str(port)]
        environment = {**os.environ, **self.plan.environment}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait(self, *, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        probe = process.Service("", "127.0.0.1", self.ports[0], "", 0, "", "", "", [])
        while not process._answers(probe, self.plan.health):
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()
            self._process = None

    def __enter__(self) -> Server:
        self.launch()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
