"""Which heads fit together, and what vLLM 0.32 serves: the one place that says it.

Standard library alone. Read by params (so that a mistake shows before anything runs), the train
stage, the package stage and the proposer. Every stage depends on this file: keep it small. Served
are: a vanilla Markov head, a confidence head or none, any number of layers, full attention,
full and reduced vocabularies, and every rope that dspark/rope.py knows.
Source: vllm/model_executor/models/qwen3_dspark.py and qwen3_dflash.py, v1/spec_decode/dflash.py,
v1/attention/backends/cpu_attn.py.
"""

from __future__ import annotations

from collections.abc import Sequence

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention, on which the load gate runs."""


def unserved(*, markov_head: str, sliding_layers: Sequence[int], head_dim: int | None) -> list[str]:
    """Why vLLM does not serve a drafter like this, one sentence a reason; empty: it does.

    head_dim None is not judged (the target's, not known yet).
    """
    reasons = []
    if markov_head in ("gated", "rnn"):
        reasons.append(
            f"markov_head {markov_head}: vLLM 0.32's Markov head knows the previous token alone, "
            "it has neither gate nor recurrent state (expected vanilla)"
        )
    if markov_head == "none":
        reasons.append(
            "markov_head none: vLLM 0.32 always builds a Markov head, and its CPU build dies while "
            "it loads one of rank 0 (expected vanilla)"
        )
    if sliding_layers:
        reasons.append(
            f"sliding_layers {list(sliding_layers)}: vLLM 0.32 counts the window from each slot "
            "and masks such layers causally; the drafter's window is counted from the anchor and "
            "its block is bidirectional (expected none)"
        )
    if head_dim is not None and head_dim not in HEAD_DIMS:
        reasons.append(
            f"head_dim {head_dim}: vLLM 0.32's CPU attention takes {list(HEAD_DIMS)} alone"
        )
    return reasons


def check_served(
    *, markov_head: str, sliding_layers: Sequence[int], head_dim: int | None, experiment: bool
) -> None:
    """Raises ValueError, with the reasons, for what is not served, unless it is an experiment."""
    reasons = unserved(markov_head=markov_head, sliding_layers=sliding_layers, head_dim=head_dim)
    if reasons and not experiment:
        raise ValueError(
            f"vLLM would not serve this drafter: {'; '.join(reasons)}; change it, or set "
            "drafter.experiment to true to train it all the same (the package stage refuses it)"
        )


def check_heads(
    *, markov_head: str, markov_rank: int, confidence_head: bool, confidence_head_with_markov: bool
) -> None:
    """Raises ValueError, with the keys of params.yaml, for heads that contradict each other."""
    if (markov_head == "none") != (markov_rank == 0):
        raise ValueError(
            "drafter.markov_rank is 0 exactly where drafter.markov_head is none, found "
            f"markov_head {markov_head} with markov_rank {markov_rank}"
        )
    if confidence_head_with_markov and not (confidence_head and markov_rank):
        raise ValueError(
            "drafter.confidence_head_with_markov needs a confidence head and a Markov head, found "
            f"confidence_head {confidence_head} and markov_head {markov_head}; set it to false"
        )
