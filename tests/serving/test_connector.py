"""Hidden states from real vLLM through real Mooncake, against transformers' own."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.params import EngineParams, Services
from stages.serving import wire
from stages.serving.chat import Renderer
from stages.serving.client import Client, Completion, run_bounded
from stages.serving.launch import Endpoint
from stages.serving.store import Store, StoreSettings

pytestmark = pytest.mark.vllm

LAYER_IDS = [1, 2, 3]  # of the fixture tiny_extract
PLANES, HIDDEN = len(LAYER_IDS) + 1, 64
RELATIVE_ERROR = 0.02  # bfloat16, Frobenius; 0.006-0.016 measured on SmolLM2
MESSAGES = [{"role": "user", "content": "Which river is the longest, and why does it matter?"}]


@pytest.fixture(scope="module")
def store(extract_endpoint: Endpoint, small_services: Services) -> Iterator[Store]:
    assert extract_endpoint.master is not None
    store = Store(
        StoreSettings.of(
            small_services.mooncake,
            master=extract_endpoint.master,
            host="127.0.0.1",
        )
    )
    yield store
    store.close()


@pytest.fixture(scope="module")
def buffer(store: Store) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    buffer = np.empty(2**20, np.uint8)
    store.register(buffer.ctypes.data, buffer.nbytes)
    return buffer


@pytest.fixture(scope="module")
def prompts(tiny_target: Path) -> list[list[int]]:
    """Lengths on both sides of the cache's block boundaries."""
    ids = Renderer(tiny_target).render(MESSAGES) * 20
    return [ids[:length] for length in (1, 2, 31, 32, 33, 64, 100, 200, 255)]


def ask(
    endpoint: Endpoint, prompts: list[list[int]], *, max_tokens: int, publish: bool
) -> list[tuple[str, Completion]]:
    """Sends all at once; the key and response of each prompt."""
    keys = [wire.new_key("test") for _ in prompts]

    async def run() -> list[tuple[str, Completion]]:
        async with Client(endpoint.url, model=endpoint.model, timeout_s=120) as client:

            async def one(index: int) -> Completion:
                return await client.complete(
                    prompts[index],
                    max_tokens=max_tokens,
                    temperature=0.0,
                    kv_transfer_params={wire.STATES_KEY: keys[index]} if publish else None,
                )

            answers = {
                index: answer
                async for index, answer in run_bounded(range(len(prompts)), one, concurrency=16)
            }
        return [(keys[index], answers[index]) for index in range(len(prompts))]

    return asyncio.run(run())


def reference(target: Path, prompt: list[int]) -> torch.Tensor:
    """[T, P, H] float32 from transformers; the last plane is what enters the final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    final: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: final.append(inputs[0]))
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    return torch.stack([*(states[k][0] for k in LAYER_IDS), final[0][0]], dim=1)


def test_states_equal_transformers_and_exist_when_the_response_arrives(
    extract_endpoint: Endpoint,
    tiny_target: Path,
    store: Store,
    buffer: np.ndarray[tuple[int], np.dtype[np.uint8]],
    prompts: list[list[int]],
) -> None:
    for prompt, (key, answer) in zip(
        prompts,
        ask(extract_endpoint, prompts, max_tokens=1, publish=True),
        strict=True,
    ):
        shape = wire.StatesShape(len(prompt), PLANES, HIDDEN)
        wire.check_reply(answer.kv_transfer_params, key=key, shape=shape)
        # No waiting: published early.
        length = store.get_into(key, buffer.ctypes.data, buffer.nbytes, wait_s=0.0)
        assert store.remove(key)
        wire.check_object(buffer, length=length, shape=shape)
        check_states(buffer[: shape.num_bytes], tiny_target, prompt)


def check_states(
    found: np.ndarray[tuple[int], np.dtype[np.uint8]], target: Path, prompt: list[int]
) -> None:
    expected = reference(target, prompt)
    states = torch.from_numpy(found.copy()).view(torch.bfloat16).float().view(expected.shape)
    for plane in range(PLANES):
        error = (states[:, plane] - expected[:, plane]).norm() / expected[:, plane].norm()
        assert error < RELATIVE_ERROR, f"{len(prompt)} tokens, plane {plane}: {error}"


def counted(endpoint: Endpoint, name: str) -> float:
    """A counter of the server, over all its labels."""
    with urllib.request.urlopen(endpoint.url + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_states_of_generated_tokens_come_from_the_cache_and_equal_transformers(
    extract_endpoint: Endpoint,
    tiny_target: Path,
    store: Store,
    buffer: np.ndarray[tuple[int], np.dtype[np.uint8]],
    prompts: list[list[int]],
) -> None:
    asked = [list(reversed(prompt)) for prompt in prompts[5:8]]
    answers = ask(extract_endpoint, asked, max_tokens=50, publish=False)
    whole = [prompt + answer.token_ids for prompt, (_, answer) in zip(asked, answers, strict=True)]
    before = counted(extract_endpoint, "vllm:prefix_cache_hits_total")
    for ids, (key, _) in zip(
        whole, ask(extract_endpoint, whole, max_tokens=1, publish=True), strict=True
    ):
        shape = wire.StatesShape(len(ids), PLANES, HIDDEN)
        length = store.get_into(key, buffer.ctypes.data, buffer.nbytes)
        assert store.remove(key)
        wire.check_object(buffer, length=length, shape=shape)
        check_states(buffer[: shape.num_bytes], tiny_target, ids)
    assert counted(extract_endpoint, "vllm:prefix_cache_hits_total") - before > sum(map(len, asked))


def test_a_request_that_generates_may_publish_its_prompt(
    extract_endpoint: Endpoint,
    store: Store,
    buffer: np.ndarray[tuple[int], np.dtype[np.uint8]],
    prompts: list[list[int]],
) -> None:
    ((key, answer),) = ask(extract_endpoint, [prompts[4]], max_tokens=8, publish=True)
    assert len(answer.token_ids) == 8
    shape = wire.StatesShape(len(prompts[4]), PLANES, HIDDEN)
    length = store.get_into(key, buffer.ctypes.data, buffer.nbytes)
    assert store.remove(key)
    wire.check_object(buffer, length=length, shape=shape)


def test_a_request_that_does_not_ask_publishes_nothing_and_verifies_no_token(
    extract_endpoint: Endpoint, store: Store, prompts: list[list[int]]
) -> None:
    drafted = counted(extract_endpoint, "vllm:spec_decode_num_draft_tokens_total")
    ((_, answer),) = ask(extract_endpoint, [prompts[3]], max_tokens=20, publish=False)
    assert answer.kv_transfer_params is None
    assert store.remove_prefix("test-") == 0
    assert counted(extract_endpoint, "vllm:spec_decode_num_draft_tokens_total") == drafted


def test_a_stream_gives_the_same_tokens_as_one_answer(
    extract_endpoint: Endpoint, prompts: list[list[int]], tiny_engine: EngineParams
) -> None:
    async def run() -> tuple[Completion, Completion]:
        async with Client(
            extract_endpoint.url, model=extract_endpoint.model, timeout_s=120
        ) as client:
            whole = await client.complete(prompts[2], max_tokens=16, temperature=0.0)
            streamed = await client.complete(
                prompts[2], max_tokens=16, temperature=0.0, stream=True
            )
        return whole, streamed

    whole, streamed = asyncio.run(run())
    assert streamed.token_ids == whole.token_ids
    assert streamed.finish_reason == whole.finish_reason
    assert len(streamed.token_times_s) == len(streamed.token_ids)


def test_the_renderer_gives_the_servers_own_tokens(
    extract_endpoint: Endpoint, tiny_target: Path
) -> None:
    body = {
        "model": extract_endpoint.model,
        "messages": [{"role": "system", "content": "Be brief."}, *MESSAGES],
        "add_generation_prompt": True,
    }
    request = urllib.request.Request(
        extract_endpoint.url + "/tokenize",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        expected = json.load(answer)["tokens"]
    assert Renderer(tiny_target).render(body["messages"]) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_tensor_parallel_server_rank_0_alone_publishes(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One CPU engine a server here: the rank's choice alone, with no engine around it."""
    from types import SimpleNamespace

    from stages.serving import connector

    cache = torch.zeros(4, PLANES, 32, HIDDEN, dtype=torch.bfloat16)
    made: list[StoreSettings] = []
    monkeypatch.setattr(connector, "get_layers_from_vllm_config", lambda *_: {"states": None})
    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(
        connector,
        "Store",
        lambda settings: SimpleNamespace(register=lambda *_: made.append(settings)),
    )
    one = object.__new__(connector.StatesConnector)
    one._num_planes, one._hidden_size, one._encoding = PLANES, HIDDEN, "bfloat16"
    one._store = one._buffer = one._cache = None
    one._vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=256))
    extra = {"master": "127.0.0.1:1", "host": "127.0.0.1", "protocol": "tcp", "device": ""}
    extra |= {"segment_bytes": 1 << 20, "local_buffer_mib": 16, "call_timeout_s": 5.0}
    one._kv_transfer_config = SimpleNamespace(kv_connector_extra_config=extra)
    one.register_kv_caches({"states": cache})
    assert len(made) == (1 if rank == 0 else 0)
    assert one.get_finished_count() == 1
    if rank:
        one.wait_for_save()  # has nothing to publish to, and asks nobody
