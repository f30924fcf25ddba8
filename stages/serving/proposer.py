"""A DSpark proposer for the V1 model runner, which has `dflash` alone (CPU runs nothing but V1).

Runs inside vLLM, where worker.py puts it. It differs from the stock DFlash proposer in the layout
(N queries, the anchor first, each of them sampled; DFlash has 1 + N and skips the first) and in the
Markov head. There is no state per request: the drafter's keys and values live in vLLM's paged
blocks, so acceptance, rejection, pre-emption and prefix caching follow the target.

Shapes: B requests, N draft tokens a request, H hidden size, r Markov rank, Vd draft vocabulary.
Cost of a pass: one backbone forward over B * N queries, one head product for all slots, then N
times an r x Vd product with its argmax; no loop over requests, no copy to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from stages.dspark.served import unserved


class Block(NamedTuple):
    """What one pass drafts; ids are the target's."""

    tokens: torch.Tensor  # int64 [B, N]
    logits: torch.Tensor  # float32 [B, N, Vd], Markov bias included
    confidences: torch.Tensor  # float32 [B, N], probability that the token is accepted; else ones


class PackageMismatch(ValueError):
    """The draft model is not a DSpark package that this proposer serves; the message says why."""


def check_drafter_config(config: Any, *, num_speculative_tokens: int) -> None:
    """Refuses a draft config that this proposer would serve wrongly (vLLM would say nothing).

    `config` is vLLM's parsed draft config. Raises PackageMismatch.
    """
    architectures = list(getattr(config, "architectures", None) or [])
    expected: dict[str, Any] = {"sample_from_anchor": True}
    found = {key: getattr(config, key, None) for key in expected}
    if architectures != ["Qwen3DSparkModel"] or found != expected:
        raise PackageMismatch(
            "the DSpark proposer serves packages of this pipeline: expected architecture "
            f"Qwen3DSparkModel with {expected}, found {architectures} with {found}; "
            "give --speculative-config the folder that the package stage wrote"
        )
    layer_types = getattr(config, "layer_types", None) or []
    reasons = unserved(
        markov_head=config.markov_head_type if config.markov_rank else "none",
        sliding_layers=[i for i, kind in enumerate(layer_types) if kind == "sliding_attention"],
        head_dim=getattr(config, "head_dim", None),
    )
    if reasons:
        raise PackageMismatch("; ".join(reasons))
    block_size = config.block_size
    if not 1 <= num_speculative_tokens <= block_size:
        raise PackageMismatch(
            f"num_speculative_tokens={num_speculative_tokens} does not fit a drafter trained with "
            f"block_size={block_size}; expected 1..{block_size}"
        )


def draft_block(
    model: Qwen3DSparkForCausalLM, hidden: torch.Tensor, *, anchors: torch.Tensor
) -> Block:
    """Drafts greedily from the backbone's output, slot by slot under the Markov bias.

    hidden is [B, N, H], anchors [B] holds the token each block starts from. Base logits are
    computed for all slots at once; the sum with the bias is float32, so that it decides between
    candidates that bfloat16 would round to a tie.
    """
    num_requests, num_slots, hidden_size = hidden.shape
    flat = hidden.reshape(-1, hidden_size)
    logits = model.compute_draft_logits(flat).float().view(num_requests, num_slots, -1)
    tokens = torch.empty(num_requests, num_slots, dtype=torch.int64, device=hidden.device)
    embeddings = []
    previous = anchors.long()
    for slot in range(num_slots):
        embedding = model.markov_embed(previous)
        embeddings.append(embedding)
        drafted = logits[:, slot].add_(model.markov_bias(embedding)).argmax(dim=-1)
        previous = model.map_draft_to_target(drafted)
        tokens[:, slot] = previous
    if model.model.confidence_head is None:
        return Block(tokens, logits, torch.ones(tokens.shape, device=hidden.device))
    confidences = model.compute_confidence(flat, torch.stack(embeddings, dim=1).flatten(0, 1))
    return Block(tokens, logits, confidences.view(num_requests, num_slots))


def norm_context_keys_by_layer(model: Qwen3DSparkForCausalLM) -> None:
    """Gives every layer's context keys their own norm on CPU, where vLLM 0.32 gives them layer 0's.

    Its model norms the keys [L, T, heads, head_dim] of all layers in one rms_norm call with gains
    [L, head_dim]; the CPU kernel reads the first row for all of them (the CUDA kernel does not),
    which spoils drafts of two layers and more without a word. Here it is one call a layer.
    """
    if not current_platform.is_cpu():
        return
    backbone = model.model

    def norm(keys: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(keys)
        for layer, gain in enumerate(backbone._k_norm_weights):
            ops.rms_norm(normed[layer], keys[layer], gain, backbone._rms_norm_eps)
        return normed

    backbone._normalize_context_k = norm


class DSparkProposer(DFlashProposer):
    """Greedy DSpark drafting behind vLLM's `dflash` method.

    Sampled requests get greedy drafts too: without draft probabilities vLLM's rejection sampler
    treats a draft as one-hot, which keeps the target's distribution.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        config = self.draft_model_config.hf_config
        check_drafter_config(config, num_speculative_tokens=self.num_speculative_tokens)
        if self.dflash_causal:
            raise PackageMismatch("the drafter's attention inside a block is bidirectional")
        if self._enable_probabilistic_draft_probs:
            raise PackageMismatch(
                "draft_sample_method 'probabilistic' is not served here; use 'greedy'"
            )
        if self.uses_mrope or vllm_config.model_config.uses_mrope:
            raise PackageMismatch("targets with M-RoPE positions are not served here")
        self.last_confidences: torch.Tensor | None = None  # [B, N], of the latest pass
        self._offsets = torch.arange(self.num_speculative_tokens, device=device)
        self._sample_indices = torch.arange(self.max_query_tokens, device=device)
        self._anchors = torch.empty(0, dtype=torch.int64, device=device)

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        if not isinstance(self.model, Qwen3DSparkForCausalLM):
            raise PackageMismatch(
                f"vLLM loaded {type(self.model).__name__}, expected Qwen3DSparkForCausalLM"
            )
        wanted = getattr(self.draft_model_config.hf_config, "enable_confidence_head", False)
        if wanted and self.model.model.confidence_head is None:
            raise PackageMismatch(
                f"{self.draft_model_config.model} has no confidence_head weights; make the package "
                "again"
            )
        norm_context_keys_by_layer(self.model)

    def set_inputs_first_pass(
        self,
        target_token_ids: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None,
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """Queries [next token, mask, ...] of each request, right after its last valid token.

        The target's batch is padded with rejected tokens: their context rows are written too, into
        slots that the queries then overwrite, since there are never more than N of them.
        """
        num_requests = cad.batch_size()
        num_slots = self.num_speculative_tokens
        num_queries = num_requests * num_slots
        num_context = target_token_ids.shape[0]

        self._dflash_num_context = num_context
        self._dflash_hidden_states = target_hidden_states
        self._context_positions_buffer[:num_context] = target_positions
        self._context_slot_mapping_buffer[:num_context] = cad.slot_mapping[:num_context]
        self._anchors = next_token_ids

        last = cad.query_start_loc[1:].long() - 1
        seq_lens = cad.seq_lens
        if num_rejected_tokens_gpu is not None:
            last = last - num_rejected_tokens_gpu
            seq_lens = seq_lens - num_rejected_tokens_gpu
        first = target_positions[last] + 1
        positions = self.positions[:num_queries].view(num_requests, num_slots)
        torch.add(first.unsqueeze(1), self._offsets[:num_slots], out=positions)

        input_ids = self.input_ids[:num_queries].view(num_requests, num_slots)
        input_ids.fill_(self.parallel_drafting_token_id)
        input_ids[:, 0] = next_token_ids

        blocks = cad.block_table_tensor.gather(1, positions // self.block_size)
        slot_mapping = self._slot_mapping_buffer[:num_queries]
        torch.add(
            (positions % self.block_size).view(-1),
            blocks.view(-1),
            alpha=self.block_size,
            out=slot_mapping,
        )

        upper_bound = cad.seq_lens_cpu_upper_bound
        # A new one: the other fields of `cad` describe the target's batch.
        new_cad = CommonAttentionMetadata(
            query_start_loc=self.arange[: num_requests + 1] * num_slots,
            query_start_loc_cpu=torch.from_numpy(self.token_arange_np[: num_requests + 1])
            * num_slots,
            seq_lens=seq_lens + num_slots,
            seq_lens_cpu_upper_bound=None if upper_bound is None else upper_bound + num_slots,
            num_reqs=cad.num_reqs,
            num_actual_tokens=num_queries,
            max_query_len=num_slots,
            max_seq_len=cad.max_seq_len + num_slots,
            block_table_tensor=cad.block_table_tensor,
            slot_mapping=slot_mapping,
            causal=False,
        )
        return num_queries, self._sample_indices[:num_queries], new_cad

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = hidden_states.view(-1, self.num_speculative_tokens, hidden_states.shape[-1])
        block = draft_block(self.model, hidden, anchors=self._anchors)
        self.last_confidences = block.confidences
        return block.tokens.view(-1), None
