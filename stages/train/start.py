"""Where a first training starts: conditioned planes, and heads that look at the newest state.

What decides a block is the target's state just before its anchor. From random weights the attention
is slow to find it: after 2,515 default steps the best head had 26% of its weight there, while a
network given that state alone drafted a better first token after 300 (docs/LOG.md). So two of three
key-value heads of the first layer start with it. Each query is made nearly constant over block
inputs and each key nearly constant over the context and zero over block inputs, by ridge regression
on the data; the rotary embedding then turns distance alone into the score. Keys and queries are
normed, so these rows may be large, and a step of the optimiser turns them little.

Shapes: A planes, H hidden size, T context tokens, L response tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter, rope_frequencies
from stages.states.source import Sample, Source
from stages.weights import TargetWeights

RMS_SAMPLES = 64
FIT_SAMPLES = 40
RIDGE = 0.05  # of the inputs' mean square
ROW_SCALE = 10.0  # of the heads' rows: how slowly a step turns them
NORM_GAIN = 1.4  # of q_norm and k_norm: scores reach 2 * sqrt(D)


class Kernel(NamedTuple):
    """How a head's score falls with the distance from query to key."""

    slowest: float  # radians a token: the rotary channels that it uses
    fastest: float
    peak: float  # tokens; below 1 it falls all along the context


KERNELS = (Kernel(0.15, 1.0, 0.0), Kernel(0.018, 0.5, -1.0), None)
"""Of key-value heads 0, 1, 2, 3, ... in turn; None stays random."""


def fresh_drafter(
    config: DrafterConfig,
    *,
    seed: int,
    weights: TargetWeights,
    source: Source,
    samples: Sequence[Sample],
) -> Drafter:
    """A drafter that has not been trained, fitted to the data that it will be trained on."""
    drafter = Drafter(config)
    drafter.initialise(seed=seed, target_norm=weights.norm)
    drafter.condition(plane_rms(source, samples))
    look_at_newest(
        drafter,
        _documents(source, samples, weights.embedding),
        mask_embedding=weights.embedding[config.mask_token_id],
    )
    return drafter


def plane_rms(source: Source, samples: Sequence[Sample]) -> Tensor:
    """Root mean square of every captured channel, float32 [A*H], over a spread of samples.

    Without first tokens: attention sinks hold values a hundred times larger there.
    """
    total, count = torch.zeros(()), 0
    for _, planes in _planes(source, _spread(samples, RMS_SAMPLES)):
        total = total + planes.float().square().sum(0)
        count += len(planes)
    return (total / max(count, 1)).sqrt()


@torch.no_grad()
def look_at_newest(
    drafter: Drafter, documents: Iterable[tuple[Tensor, Tensor]], *, mask_embedding: Tensor
) -> None:
    """Sets the first layer's queries, keys and their norms as the module says.

    documents: pairs of captured states [T, A*H] and embeddings of response tokens [L, H];
    mask_embedding: [H].
    """
    layer = drafter.layers[0]
    context, anchors = [], []
    for planes, embeddings in documents:
        projected = F.linear(planes.float(), drafter.fc.weight * drafter.plane_scale)
        context.append(drafter.hidden_norm(projected))
        anchors.append(embeddings.float())
    masks = mask_embedding.float().expand(max(1, sum(map(len, anchors)) // 2), -1)
    block = layer.input_layernorm(torch.cat([*anchors, masks]))
    keys = torch.cat([*context, block])
    in_context = torch.arange(len(keys)) < len(keys) - len(block)
    query_direction = _regress(block, torch.ones(len(block)))
    key_direction = _regress(keys, in_context.float())

    attention, config = layer.self_attn, drafter.config
    D, G = attention.head_dim, attention.num_groups
    frequencies = rope_frequencies(head_dim=D, rope=config.rope)
    for head in range(attention.num_kv_heads):
        kernel = KERNELS[head % len(KERNELS)]
        if kernel is None:
            continue
        query, key = _phases(kernel, frequencies, head_dim=D)
        queries = attention.q_proj.weight[head * G * D : (head + 1) * G * D]
        queries.add_(torch.outer(query.repeat(G), query_direction)).mul_(ROW_SCALE)
        own = attention.k_proj.weight[head * D : (head + 1) * D]
        own.add_(torch.outer(key, key_direction)).mul_(ROW_SCALE)
    attention.q_norm.weight.fill_(NORM_GAIN)
    attention.k_norm.weight.fill_(NORM_GAIN)


def _phases(kernel: Kernel, frequencies: Tensor, *, head_dim: int) -> tuple[Tensor, Tensor]:
    """Query and key [D] of length sqrt(D) whose rotated product is a sum of
    cos(frequency * (distance - peak)) over the kernel's channels; zeros where it has none."""
    half = len(frequencies)
    used = (frequencies >= kernel.slowest) & (frequencies <= kernel.fastest)
    amplitude = used * (head_dim / used.sum().clamp(min=1)) ** 0.5
    query, key = torch.zeros(2, head_dim)
    query[:half] = amplitude * torch.cos(frequencies * kernel.peak)
    query[half : 2 * half] = -amplitude * torch.sin(frequencies * kernel.peak)
    key[:half] = amplitude
    return query, key


def _regress(inputs: Tensor, wanted: Tensor) -> Tensor:
    """The direction [H] whose product with each row of inputs [P, H] is nearest to wanted [P]."""
    inputs, wanted = inputs.double(), wanted.double()
    gram = inputs.T @ inputs
    gram.diagonal().add_(RIDGE * inputs.square().sum() / inputs.shape[1])
    return torch.linalg.solve(gram, inputs.T @ wanted).float()


def _documents(
    source: Source, samples: Sequence[Sample], embedding: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    for sample, planes in _planes(source, _spread(samples, FIT_SAMPLES)):
        response = torch.tensor(sample["input_ids"])[torch.tensor(sample["loss_mask"])]
        yield planes, embedding[response]


def _spread(samples: Sequence[Sample], count: int) -> Sequence[Sample]:
    return samples[:: max(1, len(samples) // count)]


def _planes(source: Source, samples: Sequence[Sample]) -> Iterator[tuple[Sample, Tensor]]:
    """Each sample's captured states without the first token's, bfloat16 [T-1, A*H]."""
    with source.read(samples) as states:
        for sample, loaded in zip(samples, states, strict=True):
            if loaded is not None:
                yield sample, loaded.states[1:, :-1].flatten(1)
