"""The extract stage against real vLLM and Mooncake: its shards, its refusals, and SIGKILL."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from stages import contracts
from stages.extract import stage
from stages.params import EngineParams, ExtractParams, Params, Services
from stages.serving import launch, wire
from stages.serving.launch import Endpoint
from stages.serving.store import Store, StoreSettings
from stages.shards import ShardReader, read_samples
from stages.states.source import load
from tests.conversations import greedy_rows, random_rows, write_conversations

pytestmark = pytest.mark.vllm

PROJECT = Path(__file__).resolve().parents[2]
PLANES, HIDDEN = 4, 64  # of the fixtures tiny_extract and tiny_target


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def extract(
    tiny_target: Path, tiny_engine: EngineParams, tiny_extract: ExtractParams, tmp_path: Path
) -> Callable[..., contracts.Manifest]:
    """Runs the stage on tmp_path/conversations; its manifest."""

    def run(services: Services, **changes: Any) -> contracts.Manifest:
        stage.run(
            engine=tiny_engine,
            extract=tiny_extract.model_copy(update=changes),
            services=services,
            target=tiny_target,
            conversations=tmp_path / "conversations",
            out=tmp_path / "states",
        )
        return contracts.read_manifest(tmp_path / "states", "extract")

    return run


@pytest.mark.parametrize("prompt_tokens", [False, True])
def test_shards_hold_states_whose_logits_give_the_targets_own_tokens(
    prompt_tokens: bool,
    extract: Callable[..., contracts.Manifest],
    extract_endpoint: Endpoint,
    given_services: Services,
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    rows = greedy_rows(extract_endpoint, 30)
    write_conversations(tmp_path / "conversations", rows, temperature=0.0)
    manifest = extract(given_services, prompt_tokens=prompt_tokens)
    num_tokens = sum(len(ids) for ids, _ in rows)
    assert manifest.counts["samples"] == 30
    assert manifest.counts["tokens"] == num_tokens
    assert manifest.rejected == {}
    assert manifest.info["greedy_agreement"] > 0.9
    assert manifest.info["bytes_per_token"] == PLANES * HIDDEN * 2
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    reader = ShardReader.of(tmp_path / "states", manifest)
    samples = read_samples(tmp_path / "states")
    assert all(s["looping"] == (int(s["id"][1:]) % 2 == 1) for s in samples)
    assert [row["id"] for row in samples] == [f"c{index:04d}" for index in range(30)]
    for row, (ids, prompt) in zip(samples, rows, strict=True):
        assert row["input_ids"] == ids
        start = 0 if prompt_tokens else prompt  # these prompts have no first token in common
        assert row["supervised"] == [i >= start for i in range(len(ids))]
        last = load(reader, row).states[start:, -1].float()
        with torch.inference_mode():
            logits = model.lm_head(model.model.norm(last))
        torch.testing.assert_close(
            torch.tensor(row["log_sum_exp"]), logits.logsumexp(-1), rtol=0, atol=0.05
        )


def test_states_of_another_model_are_refused(
    extract: Callable[..., contracts.Manifest], given_services: Services, tmp_path: Path
) -> None:
    """Random tokens said to be greedy: what a wrong last plane or norm looks like."""
    write_conversations(tmp_path / "conversations", random_rows(40), temperature=0.0)
    with pytest.raises(ValueError, match=r"of 5\d\d greedy tokens, expected at least 80%"):
        extract(given_services)


def test_a_budget_is_enforced_before_anything_starts(
    extract: Callable[..., contracts.Manifest],
    small_services: Services,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = random_rows(5)
    write_conversations(tmp_path / "conversations", rows, temperature=1.0)
    needed = sum(len(ids) for ids, _ in rows) * PLANES * HIDDEN * 2
    with pytest.raises(ValueError, match=f"need {needed:,} bytes, above extract.byte_budget"):
        extract(small_services, byte_budget=needed - 1)
    assert f"({PLANES} planes of {HIDDEN}, bfloat16)" in capsys.readouterr().out
    assert not (tmp_path / "run" / "logs").exists()


def test_the_canary_tells_a_wrong_layer_and_is_compulsory_for_given_servers(
    extract: Callable[..., contracts.Manifest],
    given_services: Services,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_conversations(tmp_path / "conversations", random_rows(20), temperature=1.0)
    with pytest.raises(ValueError, match=r"0, but http://.* is a given server"):
        extract(given_services, canary_samples=0)
    # The server publishes planes 1, 2 and 3.
    with pytest.raises(ValueError, match=r"by plane 0: [\d.]+, 2: 0\.0\d+, 3: 0\.0.*one plane off"):
        extract(given_services, layer_ids=[0, 2, 3])
    manifest = extract(given_services)
    assert "canary: relative error by plane over 2 samples: 1: 0.0" in capsys.readouterr().out
    errors = manifest.info["canary_relative_errors"]
    assert len(errors) == PLANES
    assert all(0 < error < 0.05 for error in errors)


def test_after_sigkill_closed_shards_are_kept(
    extract: Callable[..., contracts.Manifest],
    tiny_target: Path,
    tiny_engine: EngineParams,
    tiny_extract: ExtractParams,
    given_services: Services,
    params: Params,
    write_settings: Callable[[Params, Services], None],
    tmp_path: Path,
) -> None:
    rows = random_rows(150)
    write_conversations(tmp_path / "conversations", rows, temperature=1.0)
    slow = given_services.extract.model_copy(update={"concurrency": 1})
    services = given_services.model_copy(update={"extract": slow})
    small = tiny_extract.model_copy(update={"shard_bytes": 200_000})
    write_settings(params.model_copy(update={"engine": tiny_engine, "extract": small}), services)
    killed = subprocess.Popen(
        [
            *(sys.executable, "-m", "stages.extract", "--target", str(tiny_target)),
            *("--conversations", "conversations", "--out", "states"),
        ],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("run/extract-*/pieces/*.parquet"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    closed = {path.name for path in tmp_path.glob("run/extract-*/pieces/*.parquet")}
    inodes = {
        path.name: path.stat().st_ino
        for path in tmp_path.glob("run/extract-*/artifact/*.parquet")
        if path.name in closed
    }
    manifest = extract(given_services, shard_bytes=200_000)
    assert manifest.counts["samples"] == len(rows)
    assert {name: (tmp_path / "states" / name).stat().st_ino for name in inodes} == inodes
    reader = ShardReader.of(tmp_path / "states", manifest)
    for row, (ids, _) in zip(read_samples(tmp_path / "states"), rows, strict=True):
        assert row["input_ids"] == ids
        assert reader.read(row).shape == (len(ids), PLANES * HIDDEN * 2)


def test_a_full_disk_ends_the_run_and_a_rerun_completes(
    extract: Callable[..., contracts.Manifest],
    tiny_target: Path,
    tiny_engine: EngineParams,
    tiny_extract: ExtractParams,
    given_services: Services,
    params: Params,
    write_settings: Callable[[Params, Services], None],
    tmp_path: Path,
) -> None:
    """A limit on the size of files stands for the disk: writing fails as it would there."""
    rows = random_rows(40)
    write_conversations(tmp_path / "conversations", rows, temperature=1.0)
    write_settings(
        params.model_copy(update={"engine": tiny_engine, "extract": tiny_extract}), given_services
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that write() fails with EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    command = [sys.executable, "-m", "stages.extract", "--target", str(tiny_target)]
    full = subprocess.run(
        [*command, "--conversations", "conversations", "--out", "states"],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert full.returncode == 1
    assert "extract: error: " in full.stderr
    assert "Traceback" not in full.stderr
    assert not (tmp_path / "states").exists()
    manifest = extract(given_services)
    assert manifest.counts["samples"] == len(rows)


FAULTS = ("short", "flipped", "nan", "lost", "silent", "refused")


@contextmanager
def broken_endpoint(store: Store, faults: dict[int, list[str]]) -> Iterator[tuple[str, list[int]]]:
    """An HTTP server that speaks vLLM's wire and publishes what `faults` says, by prompt length:
    the faults of its attempts in turn, then good states. Yields its URL and the lengths asked."""
    asked: list[int] = []
    buffer = np.empty(2**20, np.uint8)
    store.register(buffer.ctypes.data, buffer.nbytes)

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        length, key = len(body["prompt"]), body["kv_transfer_params"][wire.STATES_KEY]
        attempts = faults.get(length, [])
        fault = attempts[asked.count(length)] if asked.count(length) < len(attempts) else None
        asked.append(length)
        if fault == "refused":
            return web.Response(status=400, text="no")
        shape = wire.StatesShape(length, PLANES, HIDDEN)
        states = buffer[: shape.num_bytes]
        states.view(np.uint16)[:] = 0x3F80
        if fault == "nan":
            states.view(np.uint16)[5] = 0x7FC0
        buffer[shape.num_bytes : shape.object_bytes] = np.frombuffer(wire.seal(states), np.uint8)
        if fault == "flipped":
            states[0] ^= 1
        size = shape.object_bytes - (PLANES * HIDDEN * 2 if fault == "short" else 0)
        if fault != "lost":
            store.put(key, buffer.ctypes.data, size)
        answer = {
            "choices": [{"token_ids": [7], "finish_reason": "length"}],
            "kv_transfer_params": None if fault == "silent" else wire.reply(key, shape),
        }
        return web.json_response(answer)

    async def models(request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "broken"}]})

    application = web.Application()
    application.router.add_post("/v1/completions", complete)
    application.router.add_get("/v1/models", models)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(application)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", asked
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_bad_states_are_freed_asked_for_again_and_then_rejected_by_reason(
    extract: Callable[..., contracts.Manifest], small_services: Services, tmp_path: Path
) -> None:
    lengths = dict(zip(FAULTS, range(20, 26), strict=True))
    rows = [([9] * length, 5) for length in (*lengths.values(), 30, 31)]
    write_conversations(tmp_path / "conversations", rows, temperature=1.0)
    with launch.mooncake_master(small_services) as master:
        settings = StoreSettings.of(
            small_services.mooncake,
            master=master,
            host="127.0.0.1",
            segment_bytes=small_services.segment_bytes,
        )
        producer = Store(settings)
        faults = {length: [fault] * 3 for fault, length in lengths.items()}
        faults[30] = ["short", "nan"]  # and the third time it is good
        with broken_endpoint(producer, faults) as (url, asked):
            vllm = small_services.vllm.model_copy(update={"endpoint": url})
            mooncake = small_services.mooncake.model_copy(update={"master": master})
            services = small_services.model_copy(update={"vllm": vllm, "mooncake": mooncake})
            manifest = extract(
                services,
                max_attempts=3,
                max_rejected_fraction=0.9,
                canary_samples=1,  # the longest, which is good
                canary_limit=1e9,
            )
        assert producer.remove_prefix("dspark-") == 0, "every object was freed"
        producer.close()
    assert manifest.rejected == {
        "bad_checksum": 1,
        "lost": 1,
        "not_finite": 1,
        "not_published": 1,
        "server_refused": 1,
        "wrong_length": 1,
    }
    assert manifest.counts["samples"] == 2
    assert asked.count(30) == 3
    assert asked.count(lengths["nan"]) == 3
    assert asked.count(lengths["refused"]) == 1
    ledger = (tmp_path / "states" / contracts.REJECTS).read_text().splitlines()
    assert {json.loads(line)["reason"] for line in ledger} == set(manifest.rejected)
