"""The drafter's shape: the model's constructor argument and the body of the packaged config.json.

Standard library alone (with rope.py and served.py), so that serving can read it without torch. The
JSON form is the speculators format that vLLM loads; every field that vLLM or speculators would
otherwise guess (sample_from_anchor above all) is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.dspark.rope import Rope
from stages.dspark.served import check_heads

ARCHITECTURE = "DSparkDraftModel"
FORMAT_VERSION = "0.9.0"  # of the speculators format


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A DSpark drafter with a Qwen3 backbone.

    hidden_size and vocab_size are the target's: its embedding is shared. layer_ids are the target's
    captured planes (transformers' hidden_states[k]), which fc maps to one context state.
    markov_head is vanilla, gated, rnn or none (heads.py). A block sees the sliding_window context
    tokens before its anchor in sliding_layers (indices of the drafter's layers), all in the others.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    layer_ids: tuple[int, ...]
    sliding_window: int | None
    sliding_layers: tuple[int, ...]
    markov_head: str
    markov_rank: int
    confidence_head: bool
    confidence_head_with_markov: bool
    target_architecture: str

    def __post_init__(self) -> None:
        check_heads(
            markov_head=self.markov_head,
            markov_rank=self.markov_rank,
            confidence_head=self.confidence_head,
            confidence_head_with_markov=self.confidence_head_with_markov,
        )
        if (self.sliding_window is None) != (not self.sliding_layers) or not set(
            self.sliding_layers
        ) <= set(range(self.num_layers)):
            raise ValueError(
                "drafter.sliding_layers must be layers of the drafter, "
                f"0..{self.num_layers - 1}, with drafter.sliding_window set, or empty with null; "
                f"found {list(self.sliding_layers)} with window {self.sliding_window}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"drafter.num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"drafter.num_key_value_heads={self.num_key_value_heads}"
            )
        rotary_dim = self.rope.rotary_dim(self.head_dim)
        if rotary_dim % 2 or not rotary_dim:
            raise ValueError(
                f"the rotated part of a head must be even and not empty, found {rotary_dim} of "
                f"drafter.head_dim={self.head_dim}"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"drafter.draft_vocab_size must be in 1..{self.vocab_size} (the target's "
                f"vocabulary), found {self.draft_vocab_size}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"target.mask_token has id {self.mask_token_id}, outside the target's embedding "
                f"(0..{self.vocab_size - 1})"
            )

    @classmethod
    def for_target(
        cls,
        target: Mapping[str, Any],
        *,
        num_layers: int,
        block_size: int,
        num_attention_heads: int | None,
        num_key_value_heads: int | None,
        head_dim: int | None,
        intermediate_size: int | None,
        draft_vocab_size: int | None,
        sliding_window: int | None,
        sliding_layers: Sequence[int],
        markov_head: str,
        markov_rank: int,
        confidence_head: bool,
        confidence_head_with_markov: bool,
        layer_ids: tuple[int, ...],
        mask_token_id: int,
    ) -> DrafterConfig:
        """Resolves the drafter section of params.yaml (null: as the target) against the target's
        config.json. Raises ValueError for a shape that does not fit or a rope that is not known.
        """
        heads = num_attention_heads or target["num_attention_heads"]
        return cls(
            hidden_size=target["hidden_size"],
            vocab_size=target["vocab_size"],
            draft_vocab_size=min(draft_vocab_size or target["vocab_size"], target["vocab_size"]),
            num_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=num_key_value_heads or target.get("num_key_value_heads") or heads,
            head_dim=head_dim
            or target.get("head_dim")
            or target["hidden_size"] // target["num_attention_heads"],
            intermediate_size=intermediate_size or target["intermediate_size"],
            rms_norm_eps=target["rms_norm_eps"],
            rope=Rope.of(target),
            max_position_embeddings=target["max_position_embeddings"],
            block_size=block_size,
            mask_token_id=mask_token_id,
            layer_ids=layer_ids,
            sliding_window=sliding_window,
            sliding_layers=tuple(sliding_layers),
            markov_head=markov_head,
            markov_rank=markov_rank,
            confidence_head=confidence_head,
            confidence_head_with_markov=confidence_head_with_markov,
            target_architecture=target["architectures"][0],
        )

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def to_json(self) -> dict[str, Any]:
        """The packaged config.json (speculators format, read by vLLM)."""
        return {
            "architectures": [ARCHITECTURE],
            "speculators_model_type": "dspark",
            "speculators_version": FORMAT_VERSION,
            "dtype": "bfloat16",
            "transformer_layer_config": {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "attention_bias": False,
                "attention_dropout": 0.0,
                "head_dim": self.head_dim,
                "hidden_act": "silu",
                "hidden_size": self.hidden_size,
                "initializer_range": 0.02,
                "intermediate_size": self.intermediate_size,
                "layer_types": [
                    "sliding_attention" if i in self.sliding_layers else "full_attention"
                    for i in range(self.num_layers)
                ],
                "max_position_embeddings": self.max_position_embeddings,
                "num_attention_heads": self.num_attention_heads,
                "num_hidden_layers": self.num_layers,
                "num_key_value_heads": self.num_key_value_heads,
                "rms_norm_eps": self.rms_norm_eps,
                "rope_parameters": self.rope.to_json(),
                "rope_theta": self.rope.theta,
                "tie_word_embeddings": False,
                "use_cache": True,
                "use_sliding_window": bool(self.sliding_layers),
                "sliding_window": self.sliding_window,
                "vocab_size": self.vocab_size,
            },
            "aux_hidden_state_layer_ids": list(self.layer_ids),
            "block_size": self.block_size,
            "confidence_head_with_markov": self.confidence_head_with_markov,
            "draft_vocab_size": self.draft_vocab_size,
            "enable_confidence_head": self.confidence_head,
            # speculators has no type for none: its rank is zero
            "markov_head_type": "vanilla" if self.markov_head == "none" else self.markov_head,
            "markov_rank": self.markov_rank,
            "mask_token_id": self.mask_token_id,
            "sample_from_anchor": True,
            "sliding_window_non_causal": True,
            "speculators_config": {
                "algorithm": "dspark",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": self.block_size}
                ],
                "verifier": {"name_or_path": None, "architectures": [self.target_architecture]},
            },
            "tie_word_embeddings": False,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> DrafterConfig:
        """The inverse of to_json; reads what speculators saves too. Raises ValueError for another
        kind of speculator or layout."""
        layer = body["transformer_layer_config"]
        types = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
        sliding = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
        expected = {"speculators_model_type": "dspark", "sample_from_anchor": True}
        if sliding:
            expected["sliding_window_non_causal"] = True
        wrong = {key: body.get(key) for key, value in expected.items() if body.get(key) != value}
        if wrong:
            raise ValueError(f"not a drafter of this pipeline: expected {expected}, found {wrong}")
        confidence_head = body["enable_confidence_head"]
        return cls(
            hidden_size=layer["hidden_size"],
            vocab_size=layer["vocab_size"],
            draft_vocab_size=body["draft_vocab_size"],
            num_layers=layer["num_hidden_layers"],
            num_attention_heads=layer["num_attention_heads"],
            num_key_value_heads=layer["num_key_value_heads"],
            head_dim=layer["head_dim"],
            intermediate_size=layer["intermediate_size"],
            rms_norm_eps=layer["rms_norm_eps"],
            rope=Rope.of(layer),
            max_position_embeddings=layer["max_position_embeddings"],
            block_size=body["block_size"],
            mask_token_id=body["mask_token_id"],
            layer_ids=tuple(body["aux_hidden_state_layer_ids"]),
            sliding_window=layer["sliding_window"] if sliding else None,
            sliding_layers=sliding,
            markov_head=body["markov_head_type"] if body["markov_rank"] else "none",
            markov_rank=body["markov_rank"],
            confidence_head=confidence_head,
            confidence_head_with_markov=confidence_head and body["confidence_head_with_markov"],
            target_architecture=body["speculators_config"]["verifier"]["architectures"][0],
        )
