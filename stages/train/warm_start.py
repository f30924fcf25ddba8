"""Training that starts from an earlier package's weights instead of random ones.

What the weights mean must be the same: one architecture, one draft vocabulary. Anything else is
refused with both values, because shapes alone would let a shifted vocabulary pass.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from stages import contracts
from stages.dspark.config import DrafterConfig
from stages.dspark.vocab import check_d2t

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """An earlier package: where it is, its shape, and its identity for the recipe."""

    folder: Path
    config: DrafterConfig
    checksum: str

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / WEIGHTS)


def read(folder: Path) -> WarmStart:
    """Reads a package folder, verified where it has a manifest (speculators' have none).

    Raises ValueError where it is not one.
    """
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"train.warm_start: expected a package folder with {CONFIG} and {WEIGHTS}, found "
            f"{folder} without {' and '.join(missing)}; null starts from random weights"
        )
    if (folder / contracts.MANIFEST).is_file():
        contracts.read_manifest(folder, "package")
    try:
        config = DrafterConfig.from_json(json.loads((folder / CONFIG).read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"train.warm_start: {folder / CONFIG}: {error!r}") from None
    return WarmStart(
        folder=folder,
        config=config,
        checksum=contracts.fingerprint(
            {name: contracts.file_sha256(folder / name) for name in (CONFIG, WEIGHTS)}
        ),
    )


def check_architecture(warm: WarmStart, config: DrafterConfig) -> None:
    """Raises ValueError naming every value in which the package differs from `config`."""
    differing = [
        f"{field.name}: {getattr(config, field.name)!r} in params, "
        f"{getattr(warm.config, field.name)!r} in the package"
        for field in fields(DrafterConfig)
        if getattr(config, field.name) != getattr(warm.config, field.name)
    ]
    if differing:
        raise ValueError(
            f"train.warm_start: the drafter in {warm.folder} has another architecture than params "
            f"give ({'; '.join(differing)}); change the drafter section, extract.layer_ids or the "
            "target, or set train.warm_start to null"
        )


def vocabulary(
    warm: WarmStart, chosen: Tensor, counts: Tensor, *, policy: Literal["refuse", "keep"]
) -> Tensor:
    """The draft vocabulary to train with, int64 [Vd] target ids ascending.

    chosen: what the training data would choose; counts: int64 [V], occurrences of each target token
    with loss; policy: train.warm_start_vocabulary. Raises ValueError where the package's vocabulary
    is not `chosen` and the policy is to refuse.
    """
    own = torch.arange(warm.config.vocab_size)
    if warm.config.reduced_vocab:
        own = check_d2t(warm.tensors()["d2t"], vocab_size=warm.config.vocab_size)
    if policy == "keep" or torch.equal(own, chosen):
        return own
    both = {"the data's": chosen, "the package's": own}
    described = "; ".join(
        f"{name} is {contracts.fingerprint(ids.tolist())[:12]} and covers "
        f"{float(counts[ids].sum() / counts.sum()):.1%} of the training tokens"
        for name, ids in both.items()
    )
    different = len(own) - int(torch.isin(own, chosen).sum())
    raise ValueError(
        f"train.warm_start: {different} of the {len(own)} tokens in the draft vocabulary of "
        f"{warm.folder} differ from those that the training data chooses ({described}); set "
        "train.warm_start_vocabulary to keep, to go on with the package's, or train.warm_start to "
        "null"
    )
