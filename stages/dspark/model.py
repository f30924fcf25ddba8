"""The DSpark drafter: a non-causal block backbone over the target's context, with its heads.

Shapes: B documents, T context tokens, A captured planes, H hidden size, M blocks a document,
N slots a block, K key-value heads, G query heads a key-value head, D head size, R Markov rank,
V vocabulary, Vd draft vocabulary.

Every block attends to the context before its anchor (a sliding layer: to its last sliding_window
tokens) and, in both directions, to itself. The context is fc of the captured planes, normed; its
keys and values bypass the layer's input norm (DFlash). The attention builds no mask over a packed
row: scores against the context are [B, K, G*M*N, T], inside the blocks [B, K, G, M, N, N]: the cost
grows with the documents, not their square.
Parameters carry the names of the packaged checkpoint (vLLM's Qwen3DSparkForCausalLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stages.dspark.attention import block_attention
from stages.dspark.config import DrafterConfig
from stages.dspark.heads import ConfidenceHead, MarkovHead
from stages.dspark.rope import Rope

TARGET_TENSORS = ("lm_head.weight", "d2t", "t2d", "embed_tokens.weight")
"""What a checkpoint may hold besides the parameters: the head's rows and the maps of a reduced
vocabulary (ours), the target's embedding (speculators')."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rope_frequencies(*, head_dim: int, rope: Rope) -> Tensor:
    """What each rotary channel pair turns a token, radians, float32 [rotary_dim/2]."""
    rotary_dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32)
    frequencies = rope.theta ** (-exponents / rotary_dim)
    if scales := rope.frequency_scales(head_dim):
        frequencies = frequencies * torch.tensor(scales)
    return frequencies


def rope_table(positions: Tensor, *, head_dim: int, rope: Rope) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding, float32 [..., 1, rotary_dim/2] for integer positions
    [...]; the axis of size one is for heads."""
    frequencies = rope_frequencies(head_dim=head_dim, rope=rope).to(positions.device)
    angles = positions[..., None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos, sin


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Applies rope (halves layout, as Llama and Qwen) to the first channels of x [..., D], twice as
    many as the tables [..., rotary_dim/2] have; the others pass."""
    cos, sin = rope
    turned, rest = x.float(), []
    if 2 * cos.shape[-1] < x.shape[-1]:
        turned, passed = turned.tensor_split([2 * cos.shape[-1]], -1)
        rest = [passed]
    first, second = turned.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, *rest], -1).to(
        x.dtype
    )


class Attention(nn.Module):
    """Grouped-query attention of blocks over (context before the anchor, own block)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,  # [B, M, N, H]
        context: Tensor,  # [B, T, H]
        *,
        outside: Tensor,  # bool [B, M, T]: context that the block must not see
        block_rope: tuple[Tensor, Tensor],  # [B, M, N, 1, D/2]
        context_rope: tuple[Tensor, Tensor],  # [T, 1, D/2]
    ) -> Tensor:  # [B, M, N, H]
        B, M, N, _ = x.shape
        T = context.shape[1]
        K, G, D = self.num_kv_heads, self.num_groups, self.head_dim
        q = rotate(self.q_norm(self.q_proj(x).view(B, M, N, K * G, D)), block_rope)
        q = q.view(B, M, N, K, G, D).permute(0, 3, 4, 1, 2, 5) * D**-0.5  # [B, K, G, M, N, D]
        k_block = rotate(self.k_norm(self.k_proj(x).view(B, M, N, K, D)), block_rope)
        v_block = self.v_proj(x).view(B, M, N, K, D)
        k_context = rotate(self.k_norm(self.k_proj(context).view(B, T, K, D)), context_rope)
        v_context = self.v_proj(context).view(B, T, K, D)

        mixed = block_attention(
            q,
            k_context.transpose(1, 2),
            v_context.transpose(1, 2),
            k_block.permute(0, 3, 1, 2, 4),
            v_block.permute(0, 3, 1, 2, 4),
            outside=outside,
        )
        return self.o_proj(mixed.permute(0, 3, 4, 1, 2, 5).reshape(B, M, N, K * G * D))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_SwiGlu.apply(self.gate_proj(x), self.up_proj(x)))


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up; keeps its inputs alone, where autograd would keep silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)


class Drafter(nn.Module):
    """The trained part of a DSpark drafter; embedding and logit head stay the target's, frozen."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(
            len(config.layer_ids) * config.hidden_size, config.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        # Folded into fc.weight in the package, see condition().
        self.register_buffer("plane_scale", torch.ones(self.fc.in_features), persistent=False)

    @torch.no_grad()
    def initialise(self, *, seed: int, target_norm: Tensor) -> None:
        """Normal(0, 0.02) matrices from `seed`; Markov bias and confidence start at zero, and the
        last norm as the target's [H], whose logit head it feeds."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
        for name, parameter in self.named_parameters():
            zero = name == "markov_head.markov_w2.weight" or name.startswith("confidence_head.")
            if zero or name.endswith(".bias"):
                parameter.zero_()
        self.norm.weight.copy_(target_norm)

    def condition(self, plane_rms: Tensor) -> None:
        """Makes fc see captured channels of root mean square one; plane_rms: [A*H].

        A target's channels differ by two orders of magnitude, and Adam's steps are of one size.
        """
        self.plane_scale.copy_(1.0 / plane_rms.clamp(min=1e-6))

    @torch.no_grad()
    def recondition(self, plane_rms: Tensor) -> None:
        """condition() for weights that were trained before, leaving what they compute as it is.

        The scale is rounded to powers of two, so taking it out of fc.weight and folding it in again
        are exact, and Adam meets the same sizes as in a first training within a factor of sqrt(2).
        """
        self.condition(plane_rms)
        self.plane_scale.copy_(self.plane_scale.log2().round().exp2())
        self.fc.weight /= self.plane_scale

    def forward(
        self,
        planes: Tensor,
        anchors: Tensor,
        anchor_embeddings: Tensor,
        mask_embedding: Tensor,
    ) -> Tensor:
        """The backbone.

        planes: [B, T, A*H] captured states; anchors: int64 [B, M] (-1: absent, its output is
        meaningless but finite); anchor_embeddings: [B, M, H]; mask_embedding: [H].
        Returns the normed states of all slots, [B, M, N, H].
        """
        config, N = self.config, self.config.block_size
        B, M, H = anchor_embeddings.shape
        context = self.hidden_norm(F.linear(planes, self.fc.weight * self.plane_scale))
        x = torch.cat(
            [anchor_embeddings.unsqueeze(2), mask_embedding.expand(B, M, N - 1, H)], dim=2
        ).to(context.dtype)
        tokens = torch.arange(planes.shape[1], device=planes.device)
        positions = anchors.clamp(min=0).unsqueeze(-1) + torch.arange(N, device=planes.device)
        block_rope = rope_table(positions, head_dim=config.head_dim, rope=config.rope)
        context_rope = rope_table(tokens, head_dim=config.head_dim, rope=config.rope)
        outside = far = tokens >= anchors.unsqueeze(-1)
        if config.sliding_window is not None:
            far = outside | (tokens < anchors.unsqueeze(-1) - config.sliding_window)
        for i, layer in enumerate(self.layers):
            x = x + layer.self_attn(
                layer.input_layernorm(x),
                context,
                outside=far if i in config.sliding_layers else outside,
                block_rope=block_rope,
                context_rope=context_rope,
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def markov_embedding(self, previous: Tensor) -> Tensor:
        """[..., R] for previous token ids [...] of the target's vocabulary; R = 0 without head."""
        if self.markov_head is None:
            return self.fc.weight.new_zeros(*previous.shape, 0)
        return self.markov_head.markov_w1(previous)

    def markov(self, previous: Tensor, states: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the previous tokens and the latents that markov_w2 maps to biases, [P, R]
        each, of the P valid slots.

        previous: int64 [B, M, N] token ids; states: [B, M, N, H]; valid: bool [B, M, N].
        """
        head = self.markov_head
        if head is not None and head.kind == "rnn":  # runs through whole blocks
            embeddings = self.markov_embedding(previous)
            return embeddings[valid], head.block(embeddings, states)[valid]
        embeddings = self.markov_embedding(previous[valid])
        if head is None or head.kind == "vanilla":
            return embeddings, embeddings
        return embeddings, head.block(embeddings, states[valid])

    @property
    def markov_w2(self) -> Tensor:
        """[Vd, R]."""
        if self.markov_head is None:
            return self.fc.weight.new_zeros(self.config.draft_vocab_size, 0)
        return self.markov_head.markov_w2.weight

    def packaged(self, parameters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The parameters under their packaged names, plane_scale folded into fc.weight.

        parameters: given where the module itself holds parts of them.
        """
        found = parameters if parameters is not None else dict(self.named_parameters())
        tensors = {name: value.detach().clone() for name, value in found.items()}
        tensors["fc.weight"] *= self.plane_scale.to(tensors["fc.weight"].device)
        return tensors

    def load_packaged(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads parameters from a checkpoint (any dtype). Raises ValueError on missing, unknown or
        misshapen tensors; the target's own (TARGET_TENSORS) are not parameters."""
        given = {name: value for name, value in tensors.items() if name not in TARGET_TENSORS}
        own = dict(self.named_parameters())
        wrong = sorted(
            f"{name}: expected {tuple(own[name].shape) if name in own else 'nothing'}, found "
            f"{tuple(given[name].shape) if name in given else 'nothing'}"
            for name in own.keys() | given.keys()
            if name not in own or name not in given or own[name].shape != given[name].shape
        )
        if wrong:
            raise ValueError("the checkpoint does not fit its config.json: " + "; ".join(wrong))
        with torch.no_grad():
            self.plane_scale.fill_(1.0)
            for name, parameter in own.items():
                parameter.copy_(given[name])
