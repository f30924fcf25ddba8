"""The two small heads: the Markov bias of a slot's logits, and the confidence in its draft.

Shapes: N slots a block, H hidden size, R Markov rank, V vocabulary, Vd draft vocabulary; leading
axes are the caller's.

The Markov bias of slot k is markov_w2 @ latent_k, where e_k = markov_w1[token before], h_k the
slot's state, and (DSpark paper; speculators and DeepSpec name the tensors the same)
  vanilla  latent_k = e_k
  gated    latent_k = sigmoid(gate_proj [h_k, e_k]) * e_k
  rnn      [g, c, o] = joint_proj [s_k, e_k, h_k]; latent_k = tanh(o);
           s_{k+1} = sigmoid(g) * s_k + (1 - sigmoid(g)) * tanh(c), s_0 = 0
The confidence head reads h_k, and e_k where it has the Markov embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.dspark.config import DrafterConfig


class MarkovHead(nn.Module):
    """Low-rank bias of a slot's logits by the tokens before it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.markov_head
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def step(
        self, embedding: Tensor, state: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The latent [..., R] of one slot, and the memory for the next.

        embedding: [..., R] of the previous token; state: [..., H]; memory: [..., R], None at the
        first slot and for heads without one.
        """
        if self.kind == "vanilla":
            return embedding, None
        if self.kind == "gated":
            features = torch.cat([state.to(embedding.dtype), embedding], -1)
            return torch.sigmoid(self.gate_proj(features)) * embedding, None
        if memory is None:
            memory = torch.zeros_like(embedding)
        features = torch.cat([memory, embedding, state.to(embedding.dtype)], -1)
        gate, candidate, output = self.joint_proj(features).chunk(3, -1)
        gate = torch.sigmoid(gate)
        memory = gate * memory + (1.0 - gate) * torch.tanh(candidate)
        return torch.tanh(output), memory.to(embedding.dtype)

    def block(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Latents [..., N, R] of whole blocks from [..., N, R] and states [..., N, H].

        Cost: N small products one after another for rnn, one for the others.
        """
        if self.kind != "rnn":
            return self.step(embeddings, states, None)[0]
        latents, memory = [], None
        for embedding, state in zip(embeddings.unbind(-2), states.unbind(-2), strict=True):
            latent, memory = self.step(embedding, state, memory)
            latents.append(latent)
        return torch.stack(latents, -2)


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot's draft is accepted, given that those before it are."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        size = config.hidden_size + config.markov_rank * self.with_markov
        self.proj = nn.Linear(size, 1)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """float32 [...] from states [..., H] and Markov embeddings [..., R]."""
        features = states.float()
        if self.with_markov:
            features = torch.cat([features, embeddings.float()], -1)
        return F.linear(features, self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)
