"""What training and extraction need of the target: embedding, final norm and logit head.

Read from a target folder's safetensors by name, without building the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from stages.dspark.target_head import TargetHead

# Settings that change the logits beyond norm and matrix; a neutral value is harmless.
_UNSUPPORTED = {
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
}


class TargetWeights(NamedTuple):
    """V vocabulary, H hidden size; in the dtype of the files."""

    embedding: Tensor  # [V, H]
    norm: Tensor  # [H], the final RMS norm's weight
    lm_head: Tensor  # [V, H]; the embedding where the two are tied
    eps: float  # of the final norm

    def head(self, dtype: torch.dtype) -> TargetHead:
        """`dtype` is of its products."""
        return TargetHead(self.norm, self.eps, self.lm_head, dtype)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the logit head of a target with this config.json is its embedding."""
    text = config.get("text_config", config)
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def load_target_weights(target: Path) -> TargetWeights:
    """Raises ValueError where a tensor is missing, or for a family whose logits are not
    lm_head(rms_norm(state)) with a norm that multiplies by its weight."""
    config = json.loads((target / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    model_type = str(text.get("model_type", config.get("model_type", "")))
    odd = {key: text[key] for key, fine in _UNSUPPORTED.items() if text.get(key) not in fine}
    if "rms_norm_eps" not in text or model_type.startswith("gemma") or odd:
        raise ValueError(
            f"{target / 'config.json'}: model_type {model_type!r} {odd or ''} is not supported: "
            "the target's logits must be lm_head(rms_norm(state)), with a norm that multiplies "
            "by its weight (Gemma's multiplies by 1 + weight)"
        )
    files: dict[str, Path] = {}
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    embedding = _tensor(files, "embed_tokens.weight", target)
    return TargetWeights(
        embedding=embedding,
        norm=_tensor(files, "norm.weight", target),
        lm_head=embedding if is_tied(config) else _tensor(files, "lm_head.weight", target),
        eps=float(text["rms_norm_eps"]),
    )


def _tensor(files: dict[str, Path], suffix: str, target: Path) -> Tensor:
    """The tensor of this name at the top, under `model.` or under `model.language_model.`."""
    for name in (suffix, f"model.{suffix}", f"model.language_model.{suffix}"):
        if name in files:
            with safe_open(files[name], framework="pt") as file:
                return file.get_tensor(name)
    raise ValueError(
        f"{target}: expected a tensor named {suffix} or model.{suffix} in its safetensors, found "
        f"{len(files)} others (for example {sorted(files)[:3]})"
    )
