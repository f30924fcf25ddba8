"""The generate stage against a real vLLM server: its rows, its ledger, and SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages import contracts
from stages.generate import stage
from stages.params import EngineParams, GenerateParams, Params, Services
from stages.serving.chat import Renderer

pytestmark = pytest.mark.vllm

PROJECT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 24


def prompt(index: int, text: str, *, split: str = "train") -> dict[str, Any]:
    return {
        "id": f"p{index:04d}",
        "domain": "qa",
        "split": split,
        "messages": json.dumps([{"role": "user", "content": text}]),
        "tools": "",
        "source": "test",
    }


def write_prompts(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for split in ("train", "validation"):
        chosen = [row for row in rows if row["split"] == split]
        contracts.write_table(folder / f"{split}.parquet", chosen, contracts.PROMPTS)
    contracts.write_manifest(folder, contracts.Manifest(kind="prepare", recipe={}))
    return folder


@pytest.fixture
def generate(params: Params) -> GenerateParams:
    return params.generate.model_copy(update={"max_tokens": MAX_TOKENS, "looping": "keep"})


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rows_hold_the_rendered_prompt_and_the_targets_own_tokens(
    tiny_target: Path,
    tiny_engine: EngineParams,
    generate: GenerateParams,
    given_services: Services,
    tmp_path: Path,
) -> None:
    rows = [prompt(i, f"How deep is lake number {i}?") for i in range(12)]
    rows += [prompt(20 + i, f"And river {i}?", split="validation") for i in range(3)]
    rows += [prompt(30, "too long " * 300), prompt(31, "a <reponame> inside")]
    stage.run(
        engine=tiny_engine,
        generate=generate,
        services=given_services,
        target=tiny_target,
        prompts=write_prompts(tmp_path / "prompts", rows),
        out=tmp_path / "conversations",
    )
    manifest = contracts.read_manifest(tmp_path / "conversations", "generate")
    made = contracts.read_table(
        tmp_path / "conversations" / "conversations.parquet", contracts.CONVERSATIONS
    )
    assert manifest.counts == {"rows": 15, "train": 12, "validation": 3}
    assert manifest.rejected == {"mask_token": 1, "too_long": 1}
    assert sum(manifest.info["finish_reasons"].values()) == 15
    assert sum(row["looping"] for row in made) == manifest.info["looping"]
    assert [row["id"] for row in made] == [row["id"] for row in rows[:15]]
    renderer = Renderer(tiny_target)
    for source, row in zip(rows, made, strict=False):
        ids = renderer.render(json.loads(source["messages"]))
        assert row["input_ids"][: len(ids)] == ids
        assert row["loss_mask"] == [False] * len(ids) + [True] * (len(row["input_ids"]) - len(ids))
        response = row["input_ids"][len(ids) :]
        if row["finish_reason"] == "length":
            assert len(response) == MAX_TOKENS
        else:
            assert response[-1] == renderer.tokenizer.eos_token_id
    assert not list((tmp_path / "run").glob("generate-*"))


def test_too_many_rejects_fail_the_stage(
    tiny_target: Path,
    tiny_engine: EngineParams,
    generate: GenerateParams,
    given_services: Services,
    tmp_path: Path,
) -> None:
    rows = [prompt(0, "fine"), prompt(1, "a <reponame> inside")]
    with pytest.raises(ValueError, match="1 of 2 samples rejected"):
        stage.run(
            engine=tiny_engine,
            generate=generate,
            services=given_services,
            target=tiny_target,
            prompts=write_prompts(tmp_path / "prompts", rows),
            out=tmp_path / "conversations",
        )
    assert not (tmp_path / "conversations").exists()


def test_after_sigkill_only_what_was_in_flight_is_asked_again(
    tiny_target: Path,
    tiny_engine: EngineParams,
    generate: GenerateParams,
    given_services: Services,
    params: Params,
    write_settings: Callable[[Params, Services], None],
    tmp_path: Path,
) -> None:
    rows = [prompt(i, f"What is {i} times {i + 1}?") for i in range(150)]
    write_prompts(tmp_path / "prompts", rows)
    slow = given_services.generate.model_copy(update={"concurrency": 2})
    services = given_services.model_copy(update={"generate": slow})
    write_settings(
        params.model_copy(update={"engine": tiny_engine, "generate": generate}), services
    )
    killed = subprocess.Popen(
        [
            *(sys.executable, "-m", "stages.generate", "--target", str(tiny_target)),
            *("--prompts", "prompts", "--out", "conversations"),
        ],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        start_new_session=True,
    )
    journal = _wait_for_lines(tmp_path / "run", at_least=10)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    # Marks what is there, which shows in the end what was not asked again; and a torn last line.
    lines = journal.read_text().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    assert 10 <= len(whole) < len(rows)
    marked = [json.dumps({**row, "token_ids": [9, 9]}) + "\n" for row in whole]
    journal.write_text("".join(marked) + '{"id": "p01')
    stage.run(
        engine=tiny_engine,
        generate=generate,
        services=given_services,
        target=tiny_target,
        prompts=tmp_path / "prompts",
        out=tmp_path / "conversations",
    )
    made = contracts.read_table(
        tmp_path / "conversations" / "conversations.parquet", contracts.CONVERSATIONS
    )
    assert [row["id"] for row in made] == [row["id"] for row in rows]
    kept = {row["id"] for row in made if row["input_ids"][-2:] == [9, 9]}
    assert kept == {row["id"] for row in whole}


def _wait_for_lines(folder: Path, *, at_least: int) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in folder.glob(f"generate-*/{stage.JOURNAL}"):
            if path.read_bytes().count(b"\n") >= at_least:
                return path
        time.sleep(0.02)
    raise AssertionError("the stage wrote no rows")
