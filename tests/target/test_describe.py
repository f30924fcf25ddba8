"""A target's folder is checked before anything is built on it; its facts come from its files."""

from __future__ import annotations

import json
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages import contracts
from stages.params import Params, TargetParams
from stages.target import stage
from stages.target.describe import mask_token_id
from stages.target.sources import copy_model, materialise, weight_files

VOCABULARY = {"<s>": 0, "</s>": 1, "<pad>": 2, "word": 3, "<unused>": 4, "<late>": 12}
RESERVED = {"eos": {1}, "bos": {0}, "pad": {2}}


def test_a_mask_token_is_found_by_name_or_id() -> None:
    def find(token: str | int) -> int:
        return mask_token_id(token, vocabulary=VOCABULARY, reserved=RESERVED, num_rows=10)

    assert find("<unused>") == find(4) == 4
    assert find(9) == 9  # in the padding of the embedding


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("two words", "not one token"),
        ("</s>", "eos"),
        ("<s>", "bos"),
        (2, "pad"),
        ("<late>", r"outside the target's embedding \(0..9\)"),
        (10, "outside"),
        (-1, "outside"),
    ],
)
def test_a_mask_token_with_a_meaning_or_without_a_row_is_refused(
    token: str | int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mask_token_id(token, vocabulary=VOCABULARY, reserved=RESERVED, num_rows=10)


def test_the_packaged_model_is_smollm2_in_bfloat16_with_its_own_template(smol_target: Path) -> None:
    """Figures from the model's published config; tokens as its published tokenizer makes them."""
    info = contracts.read_manifest(smol_target, "target").info
    assert (info["num_layers"], info["hidden_size"], info["vocab_size"]) == (30, 576, 49152)
    assert info["mask_token_id"] == 4
    assert info["eos_token_ids"] == [2]
    weights = load_file(smol_target / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((smol_target / "config.json").read_text())["dtype"] == "bfloat16"

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smol_target)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token == "<|im_end|>"
    # Digits are split before byte level: white space in front of one stays together.
    assert tokenizer.tokenize("a\n\n42  7") == ["a", "ĊĊ", "4", "2", "ĠĠ", "7"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.fixture
def model(tiny_target: Path, tmp_path: Path) -> Path:
    """A user's own model folder, to be spoiled."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_target.iterdir():
        if path.name not in ("manifest.json", "mask_token.json"):
            shutil.copy(path, folder / path.name)
    return folder


def make(params: Params, model: Path, **changes: object) -> Path:
    values = {**params.target.model_dump(), "source": str(model), **changes}
    out = model.parent / "target"
    with chdir(model.parent):
        stage.run(target=TargetParams.model_validate(values), out=out)
    return out


def test_a_local_directory_is_copied_and_left_as_it_was(params: Params, model: Path) -> None:
    before = contracts.file_sha256(model / "model.safetensors")
    out = make(params, model)
    assert contracts.file_sha256(out / "model.safetensors") == before
    assert not (out / "model.safetensors").samefile(model / "model.safetensors")
    assert contracts.read_manifest(out, "target").info["name"] == "model"


def test_float32_weights_become_bfloat16_and_integers_stay(params: Params, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    wide = {name: tensor.float() for name, tensor in weights.items()}
    wide["position_ids"] = torch.arange(4)
    save_file(wide, model / "model.safetensors", metadata={"format": "pt"})
    narrow = load_file(make(params, model) / "model.safetensors")
    assert narrow["position_ids"].dtype == torch.int64
    assert all(torch.equal(narrow[name], weights[name]) for name in weights)


def test_the_mask_token_is_part_of_what_later_stages_are_made_from(
    params: Params, model: Path
) -> None:
    first = contracts.read_manifest(make(params, model, mask_token=4), "target")
    second = contracts.read_manifest(make(params, model, mask_token=5), "target")
    assert first.content != second.content


def test_a_model_without_a_chat_template_is_refused(params: Params, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        make(params, model)


def test_code_in_the_model_folder_is_refused_unless_trusted(params: Params, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_evil.EvilConfig"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        make(params, model)


def test_pickled_weights_are_never_read(params: Params, model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected safetensors.*pytorch_model\.bin"):
        make(params, model)


def test_a_missing_shard_is_named(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"no model-2\.safetensors"):
        weight_files(model)


def test_an_interrupted_copy_is_taken_up_where_it_stopped(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    copy_model(model, folder, trust_remote_code=False)
    first = (folder / "model.safetensors").stat().st_ino
    (folder / "config.json").unlink()
    copy_model(model, folder, trust_remote_code=False)
    assert (folder / "model.safetensors").stat().st_ino == first
    assert (folder / "config.json").is_file()


@pytest.mark.parametrize("source", ["no/such/directory", "./missing", "a b", "/missing"])
def test_a_source_that_is_nothing_known_is_refused(tmp_path: Path, source: str) -> None:
    with chdir(tmp_path), pytest.raises(ValueError, match="no directory, no hub id"):
        materialise(source, revision=None, trust_remote_code=False, folder=tmp_path)


def test_a_hub_model_offline_says_what_to_do(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    target = TargetParams(
        source="someone/something", revision="0" * 40, trust_remote_code=False, mask_token=4
    )
    with chdir(tmp_path), pytest.raises(ValueError, match=r"local hub cache.*local directory"):
        stage.run(target=target, out=tmp_path / "target")
    unpinned = target.model_copy(update={"revision": "main"})
    with chdir(tmp_path), pytest.raises(ValueError, match="revision"):
        stage.run(target=unpinned, out=tmp_path / "target")
