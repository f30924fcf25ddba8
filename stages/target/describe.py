"""What the other stages must know of a target, read from its own files and checked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from stages import contracts
from stages.target.sources import weight_files

TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
EMBEDDING_SUFFIX = "embed_tokens.weight"


def describe(folder: Path, *, mask_token: str | int, trust_remote_code: bool) -> dict[str, Any]:
    """The manifest's info for the Hugging Face folder `folder`.

    Raises ValueError for code that params do not trust, a missing chat template, or a mask token
    that is not an unused row of the embedding.
    """
    config = _json(folder / "config.json")
    for name in ("config.json", "tokenizer_config.json"):
        if "auto_map" in _json(folder / name) and not trust_remote_code:
            raise ValueError(
                f"{name} of the target has an auto_map, that is code of its own; set "
                "target.trust_remote_code to true only if you have read that code"
            )
    # Imported here: transformers takes seconds, which a refused folder need not pay.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    template = tokenizer.chat_template
    if not template:
        raise ValueError(
            f"{folder}: the tokenizer has no chat template; put the model's chat_template.jinja "
            "beside its tokenizer_config.json (a base model cannot be a target)"
        )
    text = config.get("text_config", config)
    missing = [k for k in ("num_hidden_layers", "hidden_size", "vocab_size") if k not in text]
    if missing:
        raise ValueError(f"config.json of the target has no {', '.join(missing)}")
    eos = _eos_token_ids(folder, config, tokenizer.eos_token_id)
    reserved = {
        "eos": eos,
        "bos": _ids(tokenizer.bos_token_id) | _ids(config.get("bos_token_id")),
        "pad": _ids(tokenizer.pad_token_id) | _ids(config.get("pad_token_id")),
        "unk": _ids(tokenizer.unk_token_id),
    }
    rows = _embedding_rows(folder)
    return {
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "mask_token_id": mask_token_id(
            mask_token,
            vocabulary=tokenizer.get_vocab(),
            reserved=reserved,
            num_rows=min(text["vocab_size"], rows if rows is not None else text["vocab_size"]),
        ),
        "chat_template_sha256": _sha256(
            template if isinstance(template, str) else contracts.canonical_json(template)
        ),
        "tokenizer_sha256": _files_sha256(folder, TOKENIZER_FILES),
        "weights_sha256": _files_sha256(folder, tuple(weight_files(folder))),
        "config_sha256": contracts.file_sha256(folder / "config.json"),
        "eos_token_ids": sorted(eos),
    }


def mask_token_id(
    mask_token: str | int,
    *,
    vocabulary: dict[str, int],
    reserved: dict[str, set[int]],
    num_rows: int,
) -> int:
    """The id of `mask_token` (a token of `vocabulary`, or an id), fit to mark slots to predict.

    `reserved` are ids with a meaning to the model, by role; `num_rows` is the embedding's height.
    Raises ValueError for a string that is not one token, a reserved id, or one without a row.
    """
    unused = "name an unused special token, or an id in the padding of the embedding"
    if isinstance(mask_token, str):
        if mask_token not in vocabulary:
            raise ValueError(
                f"target.mask_token: {mask_token!r} is not one token of the target's vocabulary; "
                f"{unused}"
            )
        found = vocabulary[mask_token]
    else:
        found = mask_token
    if not 0 <= found < num_rows:
        raise ValueError(
            f"target.mask_token: {mask_token!r} has id {found}, outside the target's embedding "
            f"(0..{num_rows - 1}); {unused}"
        )
    for role, ids in reserved.items():
        if found in ids:
            raise ValueError(
                f"target.mask_token: {mask_token!r} (id {found}) is the target's {role} token; "
                f"{unused}"
            )
    return found


def _eos_token_ids(folder: Path, config: dict[str, Any], tokenizer_eos: int | None) -> set[int]:
    """Every id at which vLLM stops: the generation config's (else the config's), the tokenizer's.

    Raises ValueError where there is none.
    """
    generation = _json(folder / "generation_config.json")
    stated = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    found = stated | _ids(tokenizer_eos)
    if not found:
        raise ValueError(
            f"{folder}: no eos_token_id in generation_config.json, config.json or the tokenizer; "
            "the target would never end a response"
        )
    return found


def _embedding_rows(folder: Path) -> int | None:
    """Height of the input embedding as stored, or None for an architecture that names it else."""
    for name in weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if key.endswith(EMBEDDING_SUFFIX):
                    return int(file.get_slice(key).get_shape()[0])
    return None


def _ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}


def _json(path: Path) -> dict[str, Any]:
    """A JSON file's body, {} where there is no such file. Raises ValueError naming the file."""
    if not path.is_file():
        return {}
    try:
        body = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(body).__name__}")
    return body


def _files_sha256(folder: Path, patterns: tuple[str, ...]) -> str:
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return contracts.fingerprint({path.name: contracts.file_sha256(path) for path in paths})


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
