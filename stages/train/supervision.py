"""Which tokens of a sample are trained on.

Serving starts blocks at tokens that the target produced (loss_mask), so everything that measures
looks at those. With extract.prompt_tokens the prompt's are `supervised` too: further text to learn
from, at the price of their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from stages.params import TrainParams
from stages.states.source import Sample

Mask = Literal["loss_mask", "supervised"]
"""The column of contracts.SAMPLES that says where blocks may start and have a loss."""


def trained_on(samples: Sequence[Sample], params: TrainParams) -> Mask:
    """Raises ValueError where prompt tokens are wanted and no sample has any."""
    if not params.prompt_anchors:
        return "loss_mask"
    if all(sample["supervised"] == sample["loss_mask"] for sample in samples):
        raise ValueError(
            "train.prompt_anchors is true, but the hidden states have no log-sum-exp of prompt "
            "tokens; set extract.prompt_tokens to true, or train.prompt_anchors to false"
        )
    return "supervised"
