"""`make serve`: an OpenAI-compatible server with the drafter, used as a client would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import OpenAI

from stages.params import EngineParams, Params, Services
from stages.serving.serve import served
from tests.conftest import TINY_LAYER_IDS
from tests.random_drafter import config_for, random_tensors, write_package
from tests.small_run import PROJECT


def test_a_folder_without_a_model_is_named(
    tmp_path: Path, params: Params, services: Services
) -> None:
    with pytest.raises(ValueError, match=r"holds no model \(config\.json is missing\)"):
        served(tmp_path, package=tmp_path, params=params, services=services)


@pytest.mark.vllm
def test_the_openai_client_talks_to_it_and_an_interrupt_ends_it(
    tiny_target: Path,
    tiny_engine: EngineParams,
    params: Params,
    small_services: Services,
    write_settings: Callable[[Params, Services], None],
    tmp_path: Path,
) -> None:
    config = config_for(tiny_target, layer_ids=TINY_LAYER_IDS)
    package = write_package(tmp_path / "package", config, random_tensors(config, tiny_target))
    write_settings(params.model_copy(update={"engine": tiny_engine}), small_services)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stages.serving.serve", "--package", str(package)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--target", str(tiny_target), "--port", str(port)],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until_well(port, server, tmp_path / "log")
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        [model] = client.models.list().data
        answers = [
            client.chat.completions.create(
                model=model.id,
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=8,
                temperature=temperature,
            )
            for temperature in (0.0, 1.0)
        ]
        assert all(answer.usage and answer.usage.completion_tokens for answer in answers)
        text = (tmp_path / "log").read_text()
        assert "Active proposer: DSparkProposer" in text
        assert "scheduler prefix" in text
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_well(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])
