"""The rotary embedding's schema, read from a target's config.json and written into the drafter's.

Standard library alone. D head size; the first rotary_dim(D) channels of a head rotate (halves
layout, as Llama and Qwen), the others pass. Channel pair i turns by
    position * theta ** (-2i / rotary_dim) * frequency_scales(D)[i]
and its cosine and sine are multiplied by attention_factor. Sources: transformers'
modeling_rope_utils.py; YaRN, Peng et al. 2023; tests compare with transformers and with vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPES = ("default", "linear", "llama3", "yarn")
_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding; None where the type has no such number."""

    theta: float
    type: str = "default"
    partial_rotary_factor: float = 1.0
    attention_factor: float = 1.0  # yarn
    factor: float | None = None  # how far the context is stretched; all types but default
    original_max_position_embeddings: int | None = None  # llama3, yarn: before stretching
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None  # yarn
    truncate: bool = True  # yarn: whole channels bound the ramp

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rope:
        """The rope of a transformers config in any of its schemas: rope_parameters or rope_scaling,
        one for all layers or one a layer type (full attention's is taken), theta and the partial
        factor inside or beside it. Raises ValueError for a type that the drafter does not know.
        """
        rope: dict[str, Any] = dict(
            config.get("rope_parameters") or config.get("rope_scaling") or {}
        )
        nested = [value for value in rope.values() if isinstance(value, Mapping)]
        if nested:
            rope = dict(rope.get("full_attention") or nested[0])
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in TYPES or "mrope_section" in rope:
            raise ValueError(
                f"the target's rope is {rope}; the drafter knows the types {list(TYPES)} over one "
                "position a token (no M-RoPE)"
            )
        common: dict[str, Any] = {
            "theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            "type": kind,
            "partial_rotary_factor": float(
                rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
            ),
        }
        if kind == "default":
            return cls(**common)
        if kind == "linear":
            return cls(**common, factor=_number(rope, "factor"))
        longest = config["max_position_embeddings"]
        original = int(
            config.get("original_max_position_embeddings")
            or rope.get("original_max_position_embeddings")
            or longest
        )
        factor = float(rope.get("factor") or longest / original)
        stretched: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": original}
        if kind == "llama3":
            return cls(
                **common,
                **stretched,
                low_freq_factor=_number(rope, "low_freq_factor"),
                high_freq_factor=_number(rope, "high_freq_factor"),
            )
        return cls(
            **common,
            **stretched,
            attention_factor=_attention_factor(rope, factor),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=bool(rope.get("truncate", True)),
        )

    def to_json(self) -> dict[str, Any]:
        """rope_parameters as transformers and vLLM read them: of() gives the same Rope back."""
        body: dict[str, Any] = {"rope_type": self.type, "rope_theta": self.theta}
        if self.partial_rotary_factor != 1.0:
            body["partial_rotary_factor"] = self.partial_rotary_factor
        body |= {name: getattr(self, name) for name in _NUMBERS if getattr(self, name) is not None}
        if self.type == "yarn":
            body |= {"attention_factor": self.attention_factor, "truncate": self.truncate}
        return body

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial_rotary_factor)

    def frequency_scales(self, head_dim: int) -> list[float] | None:
        """One number a channel pair, by which its frequency is multiplied; None: all are one."""
        dim = self.rotary_dim(head_dim)
        if self.type == "linear":
            return [1.0 / _known(self.factor)] * (dim // 2)
        if self.type == "llama3":
            return [self._llama3_scale(i, dim) for i in range(dim // 2)]
        if self.type == "yarn":
            low, high = self._yarn_bounds(dim)
            return [self._yarn_scale(i, low, high) for i in range(dim // 2)]
        return None

    def _llama3_scale(self, pair: int, dim: int) -> float:
        """Long waves are stretched by the factor, short ones kept, those between interpolated."""
        factor, original = _known(self.factor), _known(self.original_max_position_embeddings)
        low, high = _known(self.low_freq_factor), _known(self.high_freq_factor)
        turns = original / (2 * math.pi * self.theta ** (2 * pair / dim))
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1.0 - kept) / factor + kept

    def _yarn_bounds(self, dim: int) -> tuple[float, float]:
        """The channel pairs between which YaRN goes from keeping to stretching."""
        original = _known(self.original_max_position_embeddings)

        def pair_of(turns: float) -> float:
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(_known(self.beta_fast)), pair_of(_known(self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 if low == high else high

    def _yarn_scale(self, pair: int, low: float, high: float) -> float:
        stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
        return stretched / _known(self.factor) + (1.0 - stretched)


def _known(number: float | None) -> float:
    assert number is not None, "Rope.of sets every number of its type"
    return number


def _number(rope: Mapping[str, Any], name: str) -> float:
    if rope.get(name) is None:
        raise ValueError(f"the target's rope lacks {name}: {dict(rope)}")
    return float(rope[name])


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature of the attention, as transformers infers it where it is not written."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)
