"""Structural checks of a package folder: faults that loading it would not show. Pure but for reads.

Vd draft vocabulary, V the target's, H hidden size, A captured planes, R Markov rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter
from stages.dspark.served import unserved
from stages.dspark.vocab import check_d2t, membership
from stages.weights import TargetWeights


class PackageError(ValueError):
    """The package is not fit to be served; the message says what is wrong."""


def check_package(
    folder: Path,
    *,
    target: TargetWeights,
    layer_ids: Sequence[int],
    mask_token_id: int,
    num_layers: int,
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Checks config.json and model.safetensors of `folder` against what they were made from.

    layer_ids are the planes the drafter was trained on; mask_token_id and num_layers the target's.
    Returns the parsed config and the tensors. Raises PackageError.
    """
    config = _config(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    _check_target(
        config,
        target=target,
        layer_ids=layer_ids,
        mask_token_id=mask_token_id,
        num_layers=num_layers,
    )
    not_finite = [
        name
        for name, value in tensors.items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    if not_finite:
        raise PackageError(f"model.safetensors: values that are not finite in {not_finite}")
    with torch.device("meta"):
        expected = {name: p.shape for name, p in Drafter(config).named_parameters()}
    if config.reduced_vocab:
        expected["lm_head.weight"] = torch.Size([config.draft_vocab_size, config.hidden_size])
        expected["d2t"] = torch.Size([config.draft_vocab_size])
        expected["t2d"] = torch.Size([config.vocab_size])
    _check_shapes(tensors, expected)
    if config.reduced_vocab:
        _check_vocabulary(config, tensors, lm_head=target.lm_head)
    return config, tensors


def draft_vocabulary(config: DrafterConfig, tensors: dict[str, Tensor]) -> Tensor:
    """int64 [Vd]: the target id of each draft id. Raises PackageError for an impossible d2t."""
    if not config.reduced_vocab:
        return torch.arange(config.vocab_size)
    try:
        return check_d2t(tensors["d2t"], vocab_size=config.vocab_size)
    except ValueError as error:
        raise PackageError(f"model.safetensors: {error}") from None


def _config(body: dict[str, Any]) -> DrafterConfig:
    # vLLM reads an absent sample_from_anchor as false and then drafts in another layout.
    if body.get("sample_from_anchor") is not True:
        found = body.get("sample_from_anchor", "nothing")
        raise PackageError(f"config.json: expected sample_from_anchor true, found {found}")
    if "model_type" in body:
        raise PackageError(
            f"config.json: has model_type {body['model_type']!r}; vLLM recognises the speculators "
            "format by its absence"
        )
    try:
        config = DrafterConfig.from_json(body)
    except (KeyError, TypeError, ValueError) as error:
        raise PackageError(f"config.json: {error!r}") from None
    reasons = unserved(
        markov_head=config.markov_head,
        sliding_layers=config.sliding_layers,
        head_dim=config.head_dim,
    )
    if reasons:
        raise PackageError(
            f"an experiment, which vLLM would not serve: {'; '.join(reasons)}; it stays in the "
            "drafter folder, unpackaged"
        )
    return config


def _check_target(
    config: DrafterConfig,
    *,
    target: TargetWeights,
    layer_ids: Sequence[int],
    mask_token_id: int,
    num_layers: int,
) -> None:
    if list(config.layer_ids) != list(layer_ids) or max(layer_ids) >= num_layers:
        raise PackageError(
            "config.json: aux_hidden_state_layer_ids must be those the drafter was trained on, in "
            f"order ({list(layer_ids)}, below {num_layers}), found {list(config.layer_ids)}"
        )
    if config.mask_token_id != mask_token_id:
        raise PackageError(
            f"config.json: expected the target's mask_token_id {mask_token_id}, found "
            f"{config.mask_token_id}"
        )
    rows, width = target.embedding.shape
    if config.hidden_size != width or config.vocab_size > rows:
        raise PackageError(
            f"config.json: hidden_size {config.hidden_size} and vocab_size {config.vocab_size} do "
            f"not fit the target's embedding of {rows} x {width}, which the drafter shares"
        )


def _check_shapes(tensors: dict[str, Tensor], expected: dict[str, torch.Size]) -> None:
    wrong = [
        f"{name}: expected {_shape(expected.get(name))}, "
        f"found {_shape(tensors[name].shape if name in tensors else None)}"
        for name in sorted(expected.keys() | tensors.keys())
        if name not in expected or name not in tensors or tensors[name].shape != expected[name]
    ]
    if wrong:
        raise PackageError("model.safetensors: " + "; ".join(wrong))


def _check_vocabulary(
    config: DrafterConfig, tensors: dict[str, Tensor], *, lm_head: Tensor
) -> None:
    draft_vocab = draft_vocabulary(config, tensors)
    if not torch.equal(tensors["t2d"], membership(draft_vocab, vocab_size=config.vocab_size)):
        raise PackageError("model.safetensors: t2d does not mark the tokens that d2t maps to")
    rows = lm_head[draft_vocab].to(tensors["lm_head.weight"].dtype)
    if not torch.equal(tensors["lm_head.weight"], rows):
        raise PackageError(
            "model.safetensors: lm_head.weight is not the target's head at the tokens of d2t; the "
            "map belongs to another target or another training run"
        )


def _shape(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else str(tuple(shape))
