"""What training and extraction need of the target: embedding, final norm and logit head.

Read from a target folder's safetensors by name, without building the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor


class TargetWeights(NamedTuple):
    """V vocabulary, H hidden size; in the dtype of the files."""

    embedding: Tensor  # [V, H]
    norm: Tensor  # [H], the final RMS norm's gain
    lm_head: Tensor  # [V, H]; the embedding where the two are tied
    eps: float  # of the final norm

    def normed(self, states: Tensor) -> Tensor:
        """The final norm, applied once: pre-norm states [..., H] to float32 [..., H]."""
        return F.rms_norm(states.float(), self.norm.shape, self.norm.float(), self.eps)


def load_target_weights(target: Path) -> TargetWeights:
    """Raises ValueError where a tensor is missing or the norm is of a kind we cannot apply."""
    config = json.loads((target / "config.json").read_text())
    if config["model_type"].startswith("gemma"):
        raise ValueError(
            f"{target}: {config['model_type']} scales its final norm by (1 + weight) and its "
            "embedding; this pipeline supports plain RMS norms (Llama, Qwen, Mistral families)"
        )
    files = {
        name: path for path in sorted(target.glob("*.safetensors")) for name in _tensor_names(path)
    }
    embedding = _read(files, "model.embed_tokens.weight", target)
    tied = config.get("tie_word_embeddings", False) or "lm_head.weight" not in files
    return TargetWeights(
        embedding=embedding,
        norm=_read(files, "model.norm.weight", target),
        lm_head=embedding if tied else _read(files, "lm_head.weight", target),
        eps=float(config["rms_norm_eps"]),
    )


def _tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _read(files: dict[str, Path], suffix: str, target: Path) -> Tensor:
    names = [name for name in files if name == suffix or name.endswith("." + suffix)]
    if len(names) != 1:
        raise ValueError(f"{target}: expected one tensor named {suffix}, found {names or 'none'}")
    with safe_open(files[names[0]], framework="pt") as file:
        return torch.as_tensor(file.get_tensor(names[0]))
