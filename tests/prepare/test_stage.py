"""The stage as a whole, on the real sources and the packaged target."""

from __future__ import annotations

import json
import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from stages import contracts
from stages.params import DOMAINS, Params, PrepareParams
from stages.prepare import stage

ROOT = Path(__file__).resolve().parents[2]
AUTHORED = ROOT / "data" / "authored"
Rows = list[dict[str, Any]]


def run(params: Params, target: Path, out: Path, **changes: Any) -> contracts.Manifest:
    prepare = PrepareParams.model_validate({**params.prepare.model_dump(), **changes})
    out.parent.mkdir(exist_ok=True)
    if not (data := out.parent / "data").exists():
        data.symlink_to(ROOT / "data")  # what params.yaml names is relative to the project
    with chdir(out.parent):
        stage.run(prepare=prepare, target=target, authored=AUTHORED, out=out)
    return contracts.read_manifest(out, "prepare")


def read(folder: Path, name: str) -> Rows:
    return contracts.read_table(folder / f"{name}.parquet", contracts.PROMPTS)


def evaluation(folder: Path) -> Rows:
    return [row for domain in DOMAINS for row in read(folder, f"evaluation-{domain}")]


@pytest.fixture(scope="module")
def prompts(params: Params, smol_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepare") / "prompts"
    run(params, smol_target, out)
    return out


def test_the_default_has_a_thousand_training_prompts_and_twelve_for_each_domain(
    prompts: Path,
) -> None:
    train, validation = read(prompts, "train"), read(prompts, "validation")
    assert len(train) >= 1000
    assert {row["domain"] for row in train} == set(DOMAINS)
    assert {row["split"] for row in train} == {"train"}
    assert 0 < len(validation) < 0.1 * len(train)
    for domain in DOMAINS:
        rows = read(prompts, f"evaluation-{domain}")
        assert len(rows) == 12
        assert {(row["domain"], row["split"]) for row in rows} == {(domain, "evaluation")}
    ids = [row["id"] for row in [*train, *validation, *evaluation(prompts)]]
    assert len(set(ids)) == len(ids)


def test_no_evaluation_prompt_shares_eight_words_with_a_training_prompt(
    params: Params, prompts: Path
) -> None:
    """Brute force and apart from the stage's code: every window of every evaluation text is looked
    up as a phrase in all training text."""
    assert params.prepare.boilerplate == []

    def flat(value: Any) -> list[str]:
        if isinstance(value, str):
            return [" ".join(re.sub(r"[\W_]+", " ", value.lower()).split())]
        items = value.values() if isinstance(value, dict) else value
        return [
            text for item in items if isinstance(item, dict | list | str) for text in flat(item)
        ]

    def texts(row: dict[str, Any]) -> list[str]:
        return flat(json.loads(row["messages"])) + flat(json.loads(row["tools"] or "[]"))

    rows = read(prompts, "train") + read(prompts, "validation")
    corpus = "\n".join(f" {text} " for row in rows for text in texts(row))
    for row in evaluation(prompts):
        for text in texts(row):
            words = text.split()
            for start in range(len(words) - 7):
                phrase = " ".join(words[start : start + 8])
                assert f" {phrase} " not in corpus, (row["id"], phrase)


def test_every_prompt_fits_the_targets_own_template(
    params: Params, smol_target: Path, prompts: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smol_target)
    for row in [*read(prompts, "train"), *evaluation(prompts)]:
        ids = tokenizer.apply_chat_template(
            json.loads(row["messages"]),
            tools=json.loads(row["tools"] or "null"),
            add_generation_prompt=True,
            return_dict=False,
        )
        assert len(ids) <= params.prepare.max_prompt_tokens


def test_training_settings_do_not_touch_the_evaluation_sets(
    params: Params, smol_target: Path, prompts: Path, tmp_path: Path
) -> None:
    manifest = run(
        params, smol_target, tmp_path / "p", num_train_prompts=90, seed=5, validation_fraction=0.2
    )
    assert evaluation(tmp_path / "p") == evaluation(prompts)
    info = contracts.read_manifest(prompts, "prepare").info
    assert manifest.info["evaluation_checksum"] == info["evaluation_checksum"]
    assert manifest.info["evaluation_checksum"] == params.prepare.evaluation_checksum
    train = read(tmp_path / "p", "train") + read(tmp_path / "p", "validation")
    assert {d: sum(row["domain"] == d for row in train) for d in DOMAINS} == dict.fromkeys(
        DOMAINS, 10
    )


def test_the_same_settings_give_the_same_bytes(
    params: Params, smol_target: Path, prompts: Path, tmp_path: Path
) -> None:
    again = run(params, smol_target, tmp_path / "p")
    assert again.files == contracts.read_manifest(prompts, "prepare").files


def test_a_target_with_another_template_gets_the_same_evaluation_sets(
    params: Params, tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    run(params, tiny_target, tmp_path / "p", num_train_prompts=90)
    assert evaluation(tmp_path / "p") == evaluation(prompts)


def test_tools_that_a_template_ignores_are_counted(prompts: Path) -> None:
    rows = read(prompts, "train") + read(prompts, "validation") + evaluation(prompts)
    expected = sum(row["tools"] != "" for row in rows)
    manifest = contracts.read_manifest(prompts, "prepare")
    assert manifest.info["tools_ignored_by_template"] == expected > 50


def test_evaluation_sets_that_changed_are_refused(
    params: Params, smol_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"expected 00ff, found [0-9a-f]{64}"):
        run(params, smol_target, tmp_path / "p", evaluation_checksum="00ff", num_train_prompts=90)


def test_a_domain_without_evaluation_prompts_is_named(
    params: Params, smol_target: Path, tmp_path: Path
) -> None:
    sources = [s.model_dump() for s in params.prepare.sources if s.kind != "human_eval"]
    with pytest.raises(
        ValueError, match=r"\{'HumanEval': 0\}.*prepare\.sources.*domain: HumanEval"
    ):
        run(params, smol_target, tmp_path / "p", sources=sources)


def test_prompts_of_ones_own_are_used_and_bad_rows_are_in_the_ledger(
    params: Params, smol_target: Path, prompts: Path, tmp_path: Path
) -> None:
    """Also: a copy of an evaluation prompt, a repeated row, one that is too long, a mask token."""
    copied = json.loads(read(prompts, "evaluation-math_reasoning")[0]["messages"])[0]["content"]
    rows = [
        {"prompt": "How many liters fit into tank number 1, please?"},
        {"prompt": "How many liters fit into tank number 2, please?"},
        {"prompt": f"My homework: {copied}"},
        {"prompt": "long " * 400},
        {"prompt": "What is <reponame>?"},
        {"messages": [{"role": "bard", "content": "x"}]},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"kind": "file", "path": str(path), "domain": "qa", "use": "train"}
    sources = [*(s.model_dump() for s in params.prepare.sources), own]
    run(params, smol_target, tmp_path / "p", sources=sources, num_train_prompts=180)
    train = read(tmp_path / "p", "train") + read(tmp_path / "p", "validation")
    assert sum(row["source"].startswith("own.jsonl") for row in train) == 1
    ledger = [json.loads(line) for line in (tmp_path / "p" / "rejects.jsonl").open()]
    found = {r["id"]: r["reason"] for r in ledger if r["id"].startswith("own.jsonl")}
    assert sorted(found.values()) == [
        "duplicate", "mask_token", "overlaps_evaluation", "too_long", "unknown_role",
    ]  # fmt: skip
    assert found["own.jsonl:6"] == "unknown_role"


def test_too_many_overlaps_name_the_shared_phrase(
    params: Params, smol_target: Path, tmp_path: Path
) -> None:
    """The user's own instruction stands in every row; as boilerplate it is no overlap."""
    instruction = "Answer the following question as well as you possibly can:"
    path = tmp_path / "own.jsonl"
    rows = [{"prompt": f"{instruction} what is {word}?"} for word in "abcdefghijklmnopqrstuvw"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"kind": "file", "path": str(path), "domain": "qa", "use": "both"}
    sources = [*(s.model_dump() for s in params.prepare.sources), own]
    changes: dict[str, Any] = {
        "sources": sources,
        "num_train_prompts": 180,
        "evaluation_checksum": None,
        "max_rejected_fraction": 0.02,
    }
    with pytest.raises(ValueError, match=r"overlaps_evaluation.*answer the following.*boilerplate"):
        run(params, smol_target, tmp_path / "p", **changes)
    manifest = run(params, smol_target, tmp_path / "p", **changes, boilerplate=[instruction])
    assert manifest.rejected.get("overlaps_evaluation", 0) <= 2  # a HumanEval task or two


def test_a_template_that_refuses_a_prompt_is_a_reject_and_no_crash(
    params: Params, smol_target: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for file in smol_target.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + template
    )
    old = contracts.read_manifest(smol_target, "target", verify=False)
    (target / contracts.MANIFEST).unlink()
    contracts.write_manifest(
        target, contracts.Manifest(kind="target", recipe=old.recipe, info=old.info)
    )
    path = tmp_path / "own.jsonl"
    system = {"role": "system", "content": "Be kind."}
    user = {"role": "user", "content": "What is a quokka, and does it smile?"}
    path.write_text(json.dumps({"messages": [system, user]}) + "\n")
    own = {"kind": "file", "path": str(path), "domain": "qa", "use": "train"}
    sources = [*(s.model_dump() for s in params.prepare.sources), own]
    manifest = run(params, target, tmp_path / "p", sources=sources, num_train_prompts=90)
    assert manifest.rejected["template_refuses"] == 1
    ledger = (tmp_path / "p" / "rejects.jsonl").read_text()
    assert "no system role" in ledger


def test_a_file_of_bad_rows_fails_even_where_few_of_its_rows_are_needed(
    params: Params, smol_target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "What is a quokka?"}\n' + "{oops\n" * 2)
    own = {"kind": "file", "path": str(path), "domain": "qa", "use": "train"}
    sources = [*(s.model_dump() for s in params.prepare.sources), own]
    with pytest.raises(ValueError, match=r"2 of 3 samples rejected.*not_json.*own\.jsonl:2"):
        run(params, smol_target, tmp_path / "p", sources=sources)
