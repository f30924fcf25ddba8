"""Drafting in a real vLLM engine (CPU, tiny target, a trained drafter): lossless in float32, every
draft the one our model makes, and accepted as often as in training.

All engines run in one process of their own (engine_runs.py), which pays vLLM's import once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chisquare

from stages import contracts
from stages.dspark.draft import draft_greedy
from stages.dspark.model import Drafter
from stages.dspark.vocab import check_d2t
from stages.params import Services, load_params
from stages.serving.plans import vllm_environment
from stages.serving.speculative import read_drafter_config
from stages.shards import read_samples
from stages.states.source import CachedStates, Sample
from stages.train.passes import Passes
from stages.train.stage import frozen_tensors, whole
from stages.train.validation import replay
from stages.weights import load_target_weights
from tests.conftest import TINY_LAYER_IDS
from tests.random_drafter import config_for, random_tensors, teach_bigrams, write_package

pytestmark = pytest.mark.vllm
MAX_TOKENS = 40
SERVED = 8  # prompts, of the held-out conversations
DRAWS = {"count": 1500, "max_tokens": 3, "temperature": 0.7, "top_k": 3}

FIXED = {
    "scheduler": "fixed",
    "num_draft_tokens": None,
    "threshold": 0.3,
    "draft_sampling": "greedy",
}
PROBABILISTIC = FIXED | {"draft_sampling": "probabilistic"}
RUNS: dict[str, dict[str, Any]] = {
    "fixed": {"serve": FIXED, "max_tokens": MAX_TOKENS, "record": True},
    # Nine blocks of 32 tokens for eight requests of up to four; prompts prefilled in parts.
    "ragged": {
        "serve": FIXED,
        "max_tokens": MAX_TOKENS,
        "record": True,
        "ragged": True,
        "sizes": {"kv_cache_bytes": 500_000},
        "changes": {"max_num_batched_tokens": 48, "enable_chunked_prefill": True},
    },
    "prefix": {"serve": FIXED | {"scheduler": "prefix"}, "max_tokens": MAX_TOKENS},
    "threshold": {"serve": FIXED | {"scheduler": "threshold"}, "max_tokens": MAX_TOKENS},
    "none": {"serve": FIXED | {"scheduler": "none"}, "max_tokens": MAX_TOKENS},
    # Requests that run into max_model_len.
    "limit": {
        "serve": FIXED,
        "max_tokens": MAX_TOKENS,
        "record": True,
        "sizes": {"max_model_len": 96},
    },
    "full vocabulary": {"serve": FIXED, "max_tokens": MAX_TOKENS, "package": "full"},
    "compiled": {
        "serve": FIXED,
        "max_tokens": MAX_TOKENS,
        "changes": {"enforce_eager": False},
    },
    # As the states were made and the drafter was trained.
    "as trained": {
        "serve": FIXED,
        "max_tokens": MAX_TOKENS,
        "record": True,
        "changes": {"dtype": "bfloat16"},
    },
    "sampled": {"serve": PROBABILISTIC, "package": "taught", "draws": DRAWS},
    "sampled by threshold": {
        "serve": PROBABILISTIC | {"scheduler": "threshold"},
        "package": "taught",
        "draws": DRAWS,
    },
    "sampled after greedy drafts": {"serve": FIXED, "package": "taught", "draws": DRAWS},
}
LOSSLESS = [name for name, run in RUNS.items() if "draws" not in run and name != "as trained"]
SAMPLED = [name for name, run in RUNS.items() if "draws" in run]


@pytest.fixture(scope="module")
def samples(trained: Path) -> list[Sample]:
    """Held-out samples with prompts of many lengths."""
    held_out = [s for s in read_samples(trained / "states") if s["split"] == contracts.VALIDATION]
    by_length = sorted(held_out, key=prompt_length)
    return [by_length[index] for index in torch.linspace(0, len(by_length) - 1, SERVED).int()]


@pytest.fixture(scope="module")
def prompts(samples: list[Sample]) -> list[list[int]]:
    return [sample["input_ids"][: prompt_length(sample)] for sample in samples]


def prompt_length(sample: Sample) -> int:
    return int(sample["loss_mask"].index(True))


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def packages(
    trained: Path,
    tiny_target: Path,
    samples: list[Sample],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """The trained one, and two that are random but for a Markov head that knows a share of the
    target's own bigrams: for sampled text, which the trained one has not seen, and over the whole
    vocabulary."""
    made = {"trained": trained / "package"}
    spoken = [sample["input_ids"][prompt_length(sample) - 1 :] for sample in samples]
    for name, changes in {"taught": {}, "full": {"draft_vocab_size": 49152}}.items():
        config = config_for(tiny_target, layer_ids=TINY_LAYER_IDS, num_layers=2, **changes)
        tensors = random_tensors(config, tiny_target)
        teach_bigrams(tensors, spoken, config, tiny_target)
        if not config.reduced_vocab:
            tensors = {
                k: t for k, t in tensors.items() if k not in ("d2t", "t2d", "lm_head.weight")
            }
        made[name] = write_package(tmp_path_factory.mktemp("taught") / "package", config, tensors)
    return made


@pytest.fixture(scope="module")
def recorded(
    packages: dict[str, Path],
    tiny_target: Path,
    prompts: list[list[int]],
    small_services: Services,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recorded")
    settings = {
        "prompts": prompts,
        "target": str(tiny_target),
        "packages": {name: str(path) for name, path in packages.items()},
        "runs": RUNS,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("engine_runs.py")
    environment = {**os.environ, **vllm_environment(small_services)}
    environment["PYTHONPATH"] += os.pathsep + str(script.parent)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    finished = subprocess.run(
        [sys.executable, str(script), str(folder / "settings.json"), str(folder / "out.pt")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert "Active proposer: RecordingProposer" in finished.stdout
    assert "Draft costs, measured" in finished.stdout
    recorded: dict[str, Any] = torch.load(folder / "out.pt")
    return recorded


@pytest.mark.parametrize("name", LOSSLESS)
def test_greedy_output_is_the_plain_engines(recorded: dict[str, Any], name: str) -> None:
    """One request at a time, then all together with the first run's prefixes cached."""
    result = recorded["runs"][name]["result"]
    assert result["batch_1"] == result["plain"]
    assert result["batch_all"] == result["plain"]


def test_drafts_are_accepted_partly_and_the_rules_draft_as_they_say(
    recorded: dict[str, Any],
) -> None:
    results = {name: recorded["runs"][name]["result"] for name in LOSSLESS}
    for name in ("fixed", "ragged", "full vocabulary", "compiled"):
        drafted, accepted = (results[name][f"num_{k}_tokens"] for k in ("draft", "accepted"))
        assert 0.1 * drafted < accepted < 0.9 * drafted, name
    assert results["fixed"]["num_draft_tokens"] == 4 * results["fixed"]["num_drafts"]
    assert results["none"]["num_drafts"] == 0
    assert results["prefix"]["num_drafts"] > 0
    threshold = results["threshold"]
    assert 0 < threshold["num_draft_tokens"] < 4 * threshold["num_drafts"]
    assert results["ragged"]["num_preemptions"] > 0


@pytest.mark.parametrize("name", ["fixed", "ragged", "limit"])
def test_every_draft_is_the_one_our_model_makes_from_the_same_states(
    recorded: dict[str, Any], packages: dict[str, Path], tiny_target: Path, name: str
) -> None:
    """Catches what losslessness cannot: rejected tokens as context, wrong positions, states lost
    in rounds without a draft pass."""
    package = packages["trained"]
    config = read_drafter_config(package)
    tensors = load_file(package / "model.safetensors")
    drafter = Drafter(config).float()
    drafter.load_packaged(tensors)
    target = load_target_weights(tiny_target)
    known: dict[tuple[int, ...], torch.Tensor] = {}
    confidence_error, differing = 0.0, 0
    lengths: Counter[int] = Counter()
    batches: Counter[int] = Counter()
    rounds = recorded["runs"][name]["rounds"]
    for requests in rounds:
        batches[len(requests)] += 1
        for one in requests:
            planes = known.setdefault(
                one["prompt"], torch.zeros(256, len(config.layer_ids) * config.hidden_size)
            )
            planes[one["positions"]] = one["states"]
            length = int(one["positions"][-1]) + 1 - one["rejected"]
            if not one["drafts"]:
                lengths[0] += 1
                continue
            lengths[len(one["drafts"])] += 1
            draft = draft_greedy(
                drafter,
                embedding=target.embedding.float(),
                lm_head=tensors["lm_head.weight"].float(),
                draft_vocab=check_d2t(tensors["d2t"], vocab_size=config.vocab_size),
                planes=planes[:length],
                anchor=one["anchor"],
            )
            differing += draft.tokens.tolist()[: len(one["drafts"])] != one["drafts"]
            difference = (draft.confidences - one["confidences"]).abs().max()
            confidence_error = max(confidence_error, float(difference))
    assert sum(batches[n] for n in batches if n > 1) > 10
    assert sum(one["rejected"] > 0 for requests in rounds for one in requests) > 10
    assert sum(lengths[n] for n in lengths if n) > 50
    if name == "ragged":
        assert all(lengths[n] > 5 for n in range(5))
    assert differing == 0
    assert confidence_error < 1e-4


def test_served_drafts_are_accepted_as_often_as_the_trainer_says(
    recorded: dict[str, Any], samples: list[Sample], trained: Path, tiny_target: Path
) -> None:
    """bfloat16 on both sides; the served rounds, one request at a time and all together, of the
    responses that the trainer's replay decodes."""
    found = recorded["runs"]["as trained"]
    same = {
        tuple(sample["input_ids"][: prompt_length(sample)]): sample
        for sample, *answers in zip(
            samples, *(found["result"][batch] for batch in ("batch_1", "batch_all")), strict=True
        )
        if all(answer == sample["input_ids"][prompt_length(sample) :] for answer in answers)
    }
    assert len(same) > SERVED / 2
    accepted = []
    for one in (one for requests in found["rounds"] for one in requests if one["prompt"] in same):
        ids = same[one["prompt"]]["input_ids"]
        anchor = int(one["positions"][-1]) + 1 - one["rejected"]
        following = ids[anchor + 1 :]
        if following:  # vLLM drafts after the last token too
            assert ids[anchor] == one["anchor"]
            pairs = zip(one["drafts"], following, strict=False)
            accepted.append(len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))))
    served = 1 + sum(accepted) / len(accepted)
    replayed = replay(passes_of(trained, tiny_target), list(same.values()), domains=["qa"])
    assert served > 1.3
    assert served == pytest.approx(replayed.length(0), abs=0.05)
    assert len(accepted) == pytest.approx(2 * int(replayed.blocks[0, :, 0].sum()), rel=0.05)


def passes_of(trained: Path, target: Path) -> Passes:
    """The trainer's passes with the weights that it published."""
    params = load_params(trained / "params.yaml")
    config = read_drafter_config(trained / "drafter")
    tensors = load_file(trained / "drafter/model.safetensors")
    device = torch.device("cpu")
    return Passes(
        drafter=whole(config, tensors, device),
        frozen=frozen_tensors(
            load_target_weights(target),
            check_d2t(tensors["d2t"], vocab_size=config.vocab_size),
            config,
            dtype=params.train.dtype,
            device=device,
        ),
        source=CachedStates(
            trained / "states", contracts.read_manifest(trained / "states", "extract")
        ),
        params=params.train,
        device=device,
    )


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_output_has_the_targets_own_distribution(
    recorded: dict[str, Any], model: Any, prompts: list[list[int]], name: str
) -> None:
    """Pearson's test of all sequences of three tokens against transformers' exact probabilities
    (temperature 0.7, top 3). The first token is the prefill's, the others come from drafts."""
    found = recorded["runs"][name]
    expected = exact_distribution(model, prompts[0])
    drawn = Counter(tuple(tokens) for tokens in found["token_ids"])
    assert set(drawn) <= set(expected)
    likely = [sequence for sequence, p in expected.items() if p * DRAWS["count"] >= 5]
    observed = [drawn[sequence] for sequence in likely]
    frequencies = [expected[sequence] * DRAWS["count"] for sequence in likely]
    observed.append(DRAWS["count"] - sum(observed))
    frequencies.append(DRAWS["count"] - sum(frequencies))
    if frequencies[-1] < 1:
        observed[-2:], frequencies[-2:] = [sum(observed[-2:])], [sum(frequencies[-2:])]
    assert len(likely) > 6
    assert found["num_accepted_tokens"] > 0.1 * found["num_drafts"]
    assert chisquare(observed, frequencies).pvalue > 1e-4


@torch.inference_mode()
def exact_distribution(model: Any, prompt: list[int]) -> dict[tuple[int, ...], float]:
    prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DRAWS["max_tokens"]):
        longer = {}
        for prefix, probability in prefixes.items():
            logits = model(torch.tensor([[*prompt, *prefix]])).logits[0, -1]
            best = (logits / DRAWS["temperature"]).topk(DRAWS["top_k"])
            shares = best.values.softmax(-1).tolist()
            for token, share in zip(best.indices.tolist(), shares, strict=True):
                longer[*prefix, token] = probability * share
        prefixes = longer
    return prefixes


def test_packages_that_would_be_served_wrongly_are_refused(recorded: dict[str, Any]) -> None:
    refusals = recorded["refusals"]
    assert set(refusals) == {"dflash", "layout", "heads", "windows", "too many tokens"}
    assert "expected 1..4" in refusals["too many tokens"]
    assert "DFlashDraftModel" in refusals["dflash"]
