"""Attention of blocks over (context before the anchor, own block), with a backward of its own.

Shapes: B documents, T context tokens, M blocks a document, N slots a block, K key-value heads,
G query heads a key-value head, D head size.

Exact. Autograd would keep the weights in two dtypes and copies of them; this keeps them once, in
the dtype of the computation: [B, K, G, M, N, T + N] values a layer. Softmax is float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def block_attention(
    query: Tensor,  # [B, K, G, M, N, D], scaled
    context_key: Tensor,  # [B, K, T, D]
    context_value: Tensor,  # [B, K, T, D]
    block_key: Tensor,  # [B, K, M, N, D]
    block_value: Tensor,  # [B, K, M, N, D]
    *,
    outside: Tensor,  # bool [B, M, T]: context that the block must not see
) -> Tensor:  # [B, K, G, M, N, D]
    """All tensors but `outside` in one dtype; gradients flow to them."""
    mixed: Tensor = _BlockAttention.apply(
        query, context_key, context_value, block_key, block_value, outside
    )
    return mixed


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        block_key: Tensor,
        block_value: Tensor,
        outside: Tensor,
    ) -> Tensor:
        B, K, G, M, N, D = query.shape
        T = context_key.shape[2]
        flat = query.reshape(B, K, G * M * N, D)
        scores = torch.empty(B, K, G, M, N, T + N, device=query.device)
        scores[..., :T] = (flat @ context_key.mT).view(B, K, G, M, N, T)
        scores[..., :T].masked_fill_(outside[:, None, None, :, None, :], float("-inf"))
        scores[..., T:] = query @ block_key.unsqueeze(2).mT
        weights = scores.softmax(-1).to(query.dtype)
        del scores
        mixed = weights[..., T:] @ block_value.unsqueeze(2)
        of_context = weights[..., :T].reshape(B, K, G * M * N, T)
        mixed += (of_context @ context_value).view_as(mixed)
        ctx.save_for_backward(query, context_key, context_value, block_key, block_value, weights)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, context_key, context_value, block_key, block_value, weights = ctx.saved_tensors
        B, K, G, M, N, D = query.shape
        T = context_key.shape[2]
        flat, flat_grad = query.reshape(B, K, -1, D), grad.reshape(B, K, -1, D)
        grad_context_value = weights[..., :T].reshape(B, K, -1, T).mT @ flat_grad
        grad_block_value = (weights[..., T:].mT @ grad).sum(2)
        grad_scores = torch.empty(weights.shape, device=query.device)
        grad_scores[..., :T] = (flat_grad @ context_value.mT).view(B, K, G, M, N, T)
        grad_scores[..., T:] = grad @ block_value.unsqueeze(2).mT
        grad_scores.sub_(torch.linalg.vecdot(grad_scores, weights.float()).unsqueeze(-1))
        scores = grad_scores.mul_(weights).to(query.dtype)
        of_context, of_block = scores[..., :T].reshape(B, K, -1, T), scores[..., T:]
        grad_query = (of_context @ context_key).view_as(query)
        grad_query += of_block @ block_key.unsqueeze(2)
        grad_block_key = (of_block.mT @ query).sum(2)
        return (
            grad_query,
            of_context.mT @ flat,
            grad_context_value,
            grad_block_key,
            grad_block_value,
            None,
        )
