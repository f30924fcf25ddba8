"""Reads the target's final norm and output matrix from its safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from stages.dspark.target_head import TargetHead

_NORM = ("model.norm.weight", "model.language_model.norm.weight")
_HEAD = ("lm_head.weight",)
_EMBEDDING = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
# Settings that change the logits beyond norm and matrix; a neutral value is harmless.
_UNSUPPORTED = {
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
}


def load_head(target: Path) -> TargetHead:
    """The target's head. Raises ValueError for a family whose logits are not
    lm_head(rms_norm(state))."""
    config = json.loads((target / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    model_type = str(text.get("model_type", config.get("model_type", "")))
    odd = {key: text[key] for key, fine in _UNSUPPORTED.items() if text.get(key) not in fine}
    if "rms_norm_eps" not in text or model_type.startswith("gemma") or odd:
        raise ValueError(
            f"{target / 'config.json'}: model_type {model_type!r} {odd or ''} is not supported: "
            "extract needs a target whose logits are lm_head(rms_norm(state)), with a norm that "
            "multiplies by its weight (Gemma's multiplies by 1 + weight)"
        )
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    return TargetHead(
        _tensor(target, _NORM),
        float(text["rms_norm_eps"]),
        _tensor(target, _EMBEDDING if tied else _HEAD),
    )


def _tensor(target: Path, names: tuple[str, ...]) -> Tensor:
    found: list[str] = []
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
            for name in names:
                if name in keys:
                    return file.get_tensor(name)
            found += keys
    raise ValueError(
        f"{target}: expected a tensor named {' or '.join(names)} in its safetensors, found "
        f"{len(found)} others (for example {sorted(found)[:3]})"
    )
