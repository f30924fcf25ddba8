"""vLLM's CPU worker whose extraction drafts nothing: `--worker-cls <this module>.StatesWorker`.

extract_hidden_states poses as a drafter that proposes the sampled token again, so that every
decoding step of a generating request verifies one useless token: SmolLM2 generated 252 tokens/s
with 32 requests in flight instead of 430 or more on two cores. This proposer caches the states
and proposes nothing, so one server generates at full speed and extracts.

Model Runner V1 only; the V2 runner of accelerators keeps vLLM's own proposer.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
from vllm.v1.worker.cpu_worker import CPUWorker


class QuietProposer(ExtractHiddenStatesProposer):
    """Caches hidden states like its parent; each request's draft is empty."""

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        sampled = super().propose(*args, **kwargs)
        return [[] for _ in range(len(sampled))]


class StatesWorker(CPUWorker):
    """Puts a QuietProposer where the model runner has vLLM's."""

    def init_device(self) -> None:
        super().init_device()
        runner = self.model_runner
        if not isinstance(runner.drafter, ExtractHiddenStatesProposer):
            raise ValueError("StatesWorker needs the speculative method extract_hidden_states")
        runner.drafter = QuietProposer(runner.vllm_config, runner.device)
        # The runner skips its drafter for a whole step once a sequence has no room for a draft: the
        # states of that step's tokens would be missing from blocks that a later request reuses.
        runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens
