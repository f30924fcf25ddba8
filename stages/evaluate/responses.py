"""What the responses' tokens say beside acceptance: loops, and tokens that cannot be drafted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from stages.loops import loop_start
from stages.params import GenerateParams
from stages.serving.speculative import read_drafter_config


def read_draft_vocabulary(package: Path) -> npt.NDArray[np.bool_]:
    """bool [V]: the target tokens that the packaged drafter can propose."""
    config = read_drafter_config(package)
    if not config.reduced_vocab:
        return np.ones(config.vocab_size, dtype=np.bool_)
    with safe_open(package / "model.safetensors", framework="numpy") as file:
        known: npt.NDArray[np.bool_] = file.get_tensor("t2d")
    return known


def judged(
    row: Mapping[str, Any], *, generate: GenerateParams, known: npt.NDArray[np.bool_]
) -> dict[str, Any]:
    """An acceptance row (measure.py) with `looping` (by generate's rule) and `out_of_vocabulary`
    (how many of its tokens cannot be drafted) in place of its tokens."""
    tokens = row["token_ids"]
    start = loop_start(tokens, ngram=generate.loop_ngram, repeats=generate.loop_repeats)
    return {
        **{key: value for key, value in row.items() if key != "token_ids"},
        "looping": start is not None,
        "out_of_vocabulary": int((~known[tokens]).sum()),
    }
