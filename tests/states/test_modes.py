"""cache, stream and tee train the same drafter; several servers and ranks train it together."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from stages import contracts
from stages.params import EngineParams, ExtractParams, Params, Services
from stages.serving.launch import Endpoint, extract_servers
from stages.serving.store import Store, StoreSettings
from stages.train.states import tee_folder
from tests.conversations import greedy_rows, write_conversations
from tests.small_run import extract_and_train, start_train

pytestmark = pytest.mark.vllm

HELD_OUT, TRAINED = 8, 40


@pytest.fixture(scope="module")
def steady_services(given_services: Services) -> Services:
    """One request at a time, so that a sample's batch in the server is always the same."""
    extract = given_services.extract.model_copy(update={"concurrency": 1})
    train = given_services.train.model_copy(update={"num_threads": 1})
    return given_services.model_copy(update={"extract": extract, "train": train})


@pytest.fixture(scope="module")
def project(extract_endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modes")
    rows = greedy_rows(extract_endpoint, TRAINED + HELD_OUT)
    write_conversations(folder / "conversations", rows, temperature=0.0, validation=HELD_OUT)
    return folder


@pytest.fixture(scope="module")
def small_params(params: Params, tiny_engine: EngineParams, tiny_extract: ExtractParams) -> Params:
    drafter = params.drafter.model_copy(
        update={
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "intermediate_size": 64,
            "draft_vocab_size": 512,
            "markov_rank": 8,
        }
    )
    train = params.train.model_copy(
        update={
            "dtype": "float32",
            "num_epochs": 3,
            "batch_tokens": 256,
            "anchors_per_sample": 8,
            "validations": 2,
            "checkpoint_interval_s": 3600.0,
        }
    )
    changes = {"engine": tiny_engine, "extract": tiny_extract, "drafter": drafter, "train": train}
    return params.model_copy(update=changes)


Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(project: Path, small_params: Params, tiny_target: Path) -> Train:
    """Extracts and trains in a folder of the mode's, as commands do; its folder."""

    def run(name: str, mode: str, services: Services, **changes: Any) -> Path:
        folder = project / name
        folder.mkdir(exist_ok=True)
        extract = small_params.extract.model_copy(update={"mode": mode})
        params = small_params.model_copy(update={"extract": extract, **changes})
        extract_and_train(
            folder,
            params,
            services,
            target=tiny_target,
            conversations=project / "conversations",
        )
        return folder

    return run


def curve(folder: Path) -> list[dict[str, float]]:
    with (folder / "drafter" / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [
        {k: float(v) for k, v in row.items() if v and k not in ("train_s", "step")} for row in rows
    ]


def objects_left(services: Services) -> int:
    settings = StoreSettings.of(
        services.mooncake, master=services.mooncake.master, host="127.0.0.1"
    )
    store = Store(settings)
    left = store.remove_prefix("dspark-")
    store.close()
    return left


@pytest.fixture(scope="module")
def streamed(train: Train, steady_services: Services) -> Path:
    return train("stream", "stream", steady_services)


def test_the_three_modes_train_alike(
    streamed: Path, train: Train, steady_services: Services
) -> None:
    curves = [curve(streamed)]
    for mode in ("tee", "cache"):
        curves.append(curve(train(mode, mode, steady_services)))
    for other in curves[1:]:
        for ours, theirs in zip(curves[0], other, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
    assert objects_left(steady_services) == 0


def test_a_stream_leaves_no_states_on_disk(streamed: Path) -> None:
    manifest = contracts.read_manifest(streamed / "states", "extract")
    assert manifest.counts["shards"] == 0
    assert manifest.info["canary_relative_errors"]
    assert not list(streamed.rglob("shard-*"))
    trained = contracts.read_manifest(streamed / "drafter", "train")
    assert trained.counts["train"] == TRAINED
    assert trained.rejected == {}


def test_tee_asks_for_a_sample_once_and_a_second_training_for_none(
    train: Train, steady_services: Services, small_params: Params, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = train("tee", "tee", steady_services)  # its shards are there, whoever wrote them
    capfd.readouterr()
    with chdir(folder):
        manifest = contracts.read_manifest(folder / "states", "extract")
        shards = list(tee_folder(manifest).rglob("shards/shard-*.parquet"))
        assert shards
    other = small_params.train.model_copy(update={"seed": 5})
    train("tee", "tee", steady_services, train=other)
    assert "train: tee: 0 samples came from vLLM" in capfd.readouterr().out


def test_a_stream_killed_in_its_midst_is_freed_and_completed_by_a_rerun(
    streamed: Path,
    train: Train,
    steady_services: Services,
    small_params: Params,
    tiny_target: Path,
    project: Path,
) -> None:
    often = small_params.train.model_copy(update={"checkpoint_interval_s": 0.0})
    whole = train("killed", "stream", steady_services, train=often)
    finished = curve(whole)
    shutil.rmtree(whole / "drafter")
    killed = start_train(whole, tiny_target)
    deadline = time.monotonic() + 120
    while not list(whole.glob("run/train-*/latest.safetensors")):
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert curve(train("killed", "stream", steady_services, train=often)) == [
        pytest.approx(row, rel=2e-3) for row in finished
    ]
    assert objects_left(steady_services) == 0


@pytest.fixture(scope="module")
def second_server(
    extract_endpoint: Endpoint,
    tiny_target: Path,
    tiny_engine: EngineParams,
    tiny_extract: ExtractParams,
    given_services: Services,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Endpoint]:
    """Publishes to the shared server's master."""
    vllm = given_services.vllm.model_copy(update={"endpoint": "managed"})
    services = given_services.model_copy(update={"vllm": vllm})
    with (
        chdir(tmp_path_factory.mktemp("second-server")),
        extract_servers(
            target=tiny_target, engine=tiny_engine, extract=tiny_extract, services=services
        ) as [endpoint],
    ):
        yield endpoint


@pytest.mark.slow
def test_two_servers_and_two_ranks_equal_one_of_each(
    streamed: Path,
    train: Train,
    steady_services: Services,
    extract_endpoint: Endpoint,
    second_server: Endpoint,
    capfd: pytest.CaptureFixture[str],
) -> None:
    vllm = steady_services.vllm.model_copy(
        update={"endpoint": [extract_endpoint.url, second_server.url]}
    )
    ranks = steady_services.train.model_copy(update={"num_processes": 2, "sharding": "ddp"})
    extract = steady_services.extract.model_copy(update={"concurrency": 4})
    services = steady_services.model_copy(update={"vllm": vllm, "train": ranks, "extract": extract})
    folder = train("two", "stream", services)
    output = capfd.readouterr().out
    for rank in range(2):
        assert f"train: stream on rank {rank}: " in output
    one, two = (contracts.read_manifest(f / "drafter", "train") for f in (streamed, folder))
    assert two.counts == one.counts
    assert two.rejected == one.rejected == {}
    name = "validation_acceptance_length"
    assert curve(folder)[-1][name] == pytest.approx(curve(streamed)[-1][name], abs=0.05)
    assert objects_left(services) == 0
