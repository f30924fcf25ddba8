"""How many bytes of states there will be, and whether they may and can be written. Pure."""

from __future__ import annotations


def states_bytes(*, num_tokens: int, num_planes: int, hidden_size: int) -> int:
    """Bytes of bfloat16 states: tokens x planes x hidden x 2."""
    return num_tokens * num_planes * hidden_size * 2


def check_bytes(needed: int, *, budget: int, written: int, free: int) -> None:
    """Raises ValueError where `needed` bytes are above the budget or do not fit on the disk.

    `written` bytes of them are there already; `free` is what the disk still has.
    """
    if needed > budget:
        raise ValueError(
            f"the hidden states need {needed:,} bytes, above extract.byte_budget={budget:,}; use "
            "fewer prompts, shorter responses or fewer extract.layer_ids, or raise the budget"
        )
    if needed - written > free:
        raise ValueError(
            f"the hidden states need {needed - written:,} more bytes, the disk has {free:,} free"
        )
