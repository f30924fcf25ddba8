"""Whether the bytes of states may and can be written. Pure."""

from __future__ import annotations


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
