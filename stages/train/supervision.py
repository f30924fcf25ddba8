"""Which tokens of a sample are trained on, and which it is judged by.

A sample's log-sum-exp stands for every True of `supervised`: the tokens that the target itself
produced (loss_mask), and, with extract.prompt_tokens, those of the prompt. Serving starts blocks
at produced tokens alone, so everything that measures takes own_tokens; prompt tokens are further
text to learn from, at the price of their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from stages.train.passes import Sample


def own_tokens(sample: Sample) -> Sample:
    """The sample with the log-sum-exp of the tokens that the target produced, one per True in
    loss_mask."""
    produced = compress(sample["loss_mask"], sample["supervised"])
    return sample | {"log_sum_exp": list(compress(sample["log_sum_exp"], produced))}


def all_tokens(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with a loss on every supervised token.

    Raises ValueError where none has one beyond those that the target produced.
    """
    if all(sample["supervised"] == sample["loss_mask"] for sample in samples):
        raise ValueError(
            "train.prompt_anchors is true, but the hidden states have no log-sum-exp of prompt "
            "tokens; set extract.prompt_tokens to true, or train.prompt_anchors to false"
        )
    return [sample | {"loss_mask": sample["supervised"]} for sample in samples]
