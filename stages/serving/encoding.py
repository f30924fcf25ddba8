"""How one token's states become bytes, on the wire and in shards.

bfloat16: all planes, plane-major. bfloat16_zstd: the same bytes, which shards compress without
loss. float8_e4m3: the planes that the drafter reads, each token's plane scaled to its own maximum,
as float8 with a float32 scale; the last plane, which the loss is made of, stays bfloat16:

    [A * H float8] [A float32] [H bfloat16]

T tokens, P planes, A = P - 1 planes that the drafter reads, H hidden size, W bytes a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.contracts import FLOAT8, token_bytes

_LARGEST = 448.0  # of float8 e4m3


def encode(states: Tensor, encoding: str) -> Tensor:
    """states: bfloat16 [T, P, H]. Returns uint8 [T, W]."""
    num_tokens, num_planes, hidden = states.shape
    if encoding != FLOAT8:
        return states.contiguous().view(torch.uint8).view(num_tokens, -1)
    captured, last = states[:, :-1].float(), states[:, -1]
    scale = captured.abs().amax(-1) / _LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    small = (captured / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    row = torch.empty(
        num_tokens,
        token_bytes(num_planes, hidden, encoding),
        dtype=torch.uint8,
        device=states.device,
    )
    end = (num_planes - 1) * hidden
    row[:, :end] = small.view(torch.uint8).flatten(1)
    row[:, end : -2 * hidden] = scale.view(torch.uint8)
    row[:, -2 * hidden :] = last.contiguous().view(torch.uint8)
    return row


def decode(raw: Tensor, *, num_planes: int, hidden_size: int, encoding: str) -> Tensor:
    """raw: uint8 [T, W]. Returns bfloat16 [T, P, H]; of bfloat16 the same memory."""
    shape = (len(raw), num_planes, hidden_size)
    if encoding != FLOAT8:
        return raw.view(torch.bfloat16).view(shape)
    end = (num_planes - 1) * hidden_size
    small = raw[:, :end].contiguous().view(torch.float8_e4m3fn).view(len(raw), -1, hidden_size)
    scale = raw[:, end : -2 * hidden_size].contiguous().view(torch.float32).unsqueeze(-1)
    states = torch.empty(shape, dtype=torch.bfloat16)
    states[:, :-1] = small.float() * scale
    states[:, -1] = raw[:, -2 * hidden_size :].contiguous().view(torch.bfloat16)
    return states
