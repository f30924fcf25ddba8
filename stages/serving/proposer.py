"""A DSpark proposer for the V1 model runner, which has `dflash` alone (CPU runs nothing but V1).

Runs inside vLLM, where worker.py puts it. It differs from the stock DFlash proposer in the layout
(N queries, the anchor first, each of them sampled; DFlash has 1 + N and skips the first) and in the
Markov head. There is no state per request: the drafter's keys and values live in vLLM's paged
blocks, so acceptance, rejection, pre-emption and prefix caching follow the target.

Whether a round drafts, and how many of its drafts are verified, is the policy's to say (policy.py).
A round that does not draft keeps the states that the target gave; they become the drafter's keys
and values all at once when drafting resumes, or when there are many.

Shapes: B requests, N draft tokens a request, T context tokens, H hidden size, r Markov rank,
V vocabulary, Vd draft vocabulary.
Cost of a pass: one backbone forward over B * N queries, one head product for all slots, then N
times an r x Vd product with its argmax, then the drafts go to the host.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from stages.dspark.served import unserved
from stages.serving.blocks import draft_block, norm_context_keys_by_layer
from stages.serving.policy import DraftPolicy

PENDING = 1024  # context tokens that wait at most


class _Greedy(NamedTuple):
    """What a pass reads of the sampling metadata."""

    all_greedy: bool = True
    temperature: None = None


_GREEDY: Any = _Greedy()


class Context(NamedTuple):
    """What the target gave in one step, for the drafter's keys and values."""

    states: torch.Tensor  # [T, A*H]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T], places in the paged cache


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


def latest(parts: list[Context]) -> Context:
    """All of them in order; of rows for one slot (it was freed, or its token rejected) the last."""
    if len(parts) == 1:
        return parts[0]
    context = Context(*(torch.cat(column) for column in zip(*parts, strict=True)))
    slots, order = context.slots.sort(stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    last[:-1] = slots[1:] != slots[:-1]
    keep = order[last]
    return Context(*(column[keep] for column in context))


class DSparkProposer(DFlashProposer):
    """DSpark drafting behind vLLM's `dflash` method.

    A sampled request gets drafts from the drafter's own distribution where draft_sample_method is
    probabilistic, and greedy ones otherwise, which vLLM's rejection sampler takes for one-hot;
    either keeps the target's distribution.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        runner: Any = None,
        *,
        policy: DraftPolicy,
    ) -> None:
        super().__init__(vllm_config, device, runner)
        config = self.draft_model_config.hf_config
        check_drafter_config(config, num_speculative_tokens=self.num_speculative_tokens)
        if self.dflash_causal:
            raise PackageMismatch("the drafter's attention inside a block is bidirectional")
        if self.uses_mrope or vllm_config.model_config.uses_mrope:
            raise PackageMismatch("targets with M-RoPE positions are not served here")
        self.policy, self.runner = policy, runner
        self.last_confidences: torch.Tensor | None = None  # [B, N], of the latest pass
        self.measuring = False  # costs.py runs the target alone
        self._pending: list[Context] = []
        self._started: float | None = None  # the latest round
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

    def propose(  # ragged drafts, which the V1 runner takes as lists
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The draft tokens of each request to be verified, none for some or all."""
        started = time.perf_counter()
        num_requests = common_attn_metadata.batch_size()
        decoding = torch.from_numpy(~self.runner.discard_request_mask.np[:num_requests])
        self._last_draft_probs = None
        slots = common_attn_metadata.slot_mapping[: len(target_positions)]
        self._pending.append(Context(target_hidden_states, target_positions.clone(), slots.clone()))
        statistics = self.policy.statistics
        num_decoding = int(decoding.sum())
        if not num_decoding:
            self._started = None
            self._write_context(above=PENDING)
            return [[]] * num_requests
        if self._started is not None:
            self.policy.took(
                started - self._started,
                num_requests=num_decoding,
                num_tokens=common_attn_metadata.num_actual_tokens,
            )
        self._started = started
        drafts = self.policy.wants_draft(num_decoding)
        decided = time.perf_counter()
        statistics.decision_s += decided - started
        if not drafts:
            self._write_context(above=PENDING)
            statistics.context_s += time.perf_counter() - decided
            return [[]] * num_requests
        self._write_context(above=0)
        tokens = super().propose(
            num_speculative_tokens,
            target_token_ids,
            target_positions,
            target_hidden_states[:1],  # what becomes of it was written already
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            sampling_metadata,
            mm_embed_inputs,
            num_rejected_tokens_gpu,
            slot_mappings,
        )
        drafted = time.perf_counter()
        statistics.draft_s += drafted - decided
        assert self.last_confidences is not None
        seq_lens = _valid(common_attn_metadata.seq_lens, num_rejected_tokens_gpu)
        fits = seq_lens[:num_requests] + num_speculative_tokens <= self.max_model_len
        lengths = self.policy.lengths(self.last_confidences.cpu(), may_draft=decoding & fits.cpu())
        listed = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        statistics.decision_s += time.perf_counter() - drafted
        return listed

    def draft(
        self,
        *,
        states: torch.Tensor,
        positions: torch.Tensor,
        next_token_ids: torch.Tensor,
        metadata: CommonAttentionMetadata,
    ) -> torch.Tensor:
        """One greedy pass, context included: int64 [B, N]. For costs.py."""
        self._pending = [Context(states, positions, metadata.slot_mapping)]
        self._write_context(above=0)
        return super().propose(
            self.num_speculative_tokens,
            torch.zeros_like(positions),
            positions,
            states[:1],
            next_token_ids,
            None,
            metadata,
            _GREEDY,
        )

    def dummy_run(self, num_tokens: int, *given: Any, **named: Any) -> None:
        if not self.measuring:
            super().dummy_run(num_tokens, *given, **named)

    def _write_context(self, *, above: int) -> None:
        """Makes keys and values of the waiting context, where it is more than `above` tokens."""
        if sum(len(part.slots) for part in self._pending) <= above:
            return
        context = latest(self._pending)
        self._pending = []
        for states, positions, slots in zip(
            *(column.split(self.max_num_tokens) for column in context), strict=True
        ):
            combined = self.model.combine_hidden_states(states)
            self.model.precompute_and_store_context_kv(combined, positions, slots)

    def build_model_inputs_first_pass(
        self, num_tokens: int, num_input_tokens: int, mm_embed_inputs: Any
    ) -> tuple[dict[str, Any], int]:
        """The queries alone: the context was written by _write_context()."""
        inputs = {
            "input_ids": self.input_ids[:num_input_tokens],
            "positions": self._get_positions(num_input_tokens),
            "inputs_embeds": None,
        }
        return inputs, num_input_tokens

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
        slots that the queries then overwrite, since there are never more than N of them. A request
        whose block does not fit below max_model_len takes part with queries that are written
        nowhere; nothing of it is verified.
        """
        num_requests = cad.batch_size()
        num_slots = self.num_speculative_tokens
        num_queries = num_requests * num_slots
        longest = self.max_model_len
        self._anchors = next_token_ids

        last = _valid(cad.query_start_loc[1:].long() - 1, num_rejected_tokens_gpu)
        seq_lens = _valid(cad.seq_lens, num_rejected_tokens_gpu)
        first = target_positions[last] + 1
        positions = self.positions[:num_queries].view(num_requests, num_slots)
        torch.add(first.unsqueeze(1), self._offsets[:num_slots], out=positions)
        outside = positions >= longest
        positions.clamp_(max=longest - 1)

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
        slot_mapping.masked_fill_(outside.view(-1), -1)

        upper_bound = cad.seq_lens_cpu_upper_bound
        if upper_bound is not None:
            upper_bound = (upper_bound + num_slots).clamp(max=longest)
        # A new one: the other fields of `cad` describe the target's batch.
        new_cad = CommonAttentionMetadata(
            query_start_loc=self.arange[: num_requests + 1] * num_slots,
            query_start_loc_cpu=torch.from_numpy(self.token_arange_np[: num_requests + 1])
            * num_slots,
            seq_lens=(seq_lens + num_slots).clamp(max=longest),
            seq_lens_cpu_upper_bound=upper_bound,
            num_reqs=cad.num_reqs,
            num_actual_tokens=num_queries,
            max_query_len=num_slots,
            max_seq_len=min(cad.max_seq_len + num_slots, longest),
            block_table_tensor=cad.block_table_tensor,
            slot_mapping=slot_mapping,
            causal=False,
        )
        return num_queries, self._sample_indices[:num_queries], new_cad

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = hidden_states.view(-1, self.num_speculative_tokens, hidden_states.shape[-1])
        sampled = self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
        temperature = sampling_metadata.temperature if sampled else None
        block = draft_block(self.model, hidden, anchors=self._anchors, temperature=temperature)
        self.last_confidences = block.confidences
        return block.tokens.view(-1), block.probabilities


def _valid(values: torch.Tensor, num_rejected: torch.Tensor | None) -> torch.Tensor:
    """Without the rejected tokens that pad the target's batch."""
    return values if num_rejected is None else values - num_rejected
