"""vLLM's rejection sampler, mended in two places where vLLM 0.32 is wrong. Runs inside vLLM.

- Its CPU build spreads each request's temperature, top_k and top_p over its draft tokens into a
  copy that is thrown away (cpu_triton_utils._expand_kernel_impl), so sampled requests are verified
  against a distribution of uninitialised numbers; it also reads a temperature as an integer.
- In a step in which nothing was drafted, any prefill step for one, it goes on with an empty batch:
  the server dies of top_k there (a maximum over nothing), and without it the step is only slower.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class DraftSampler(rejection_sampler.RejectionSampler):
    """The plain sampler where there is no draft."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        if any(metadata.num_draft_tokens):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        output: SamplerOutput = self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        return output


def mend_expansion() -> None:
    """Replaces the function that is wrong on CPU, for the whole process."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """[num_tokens] from x [B], each value as often as its request has tokens.

    cu_num_tokens [B] are the cumulative numbers of tokens; replace_from becomes replace_to.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)
