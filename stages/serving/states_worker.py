"""vLLM's CPU worker whose extraction drafts nothing: `--worker-cls <this module>.StatesWorker`.

extract_hidden_states poses as a drafter that proposes the sampled token again, so that every
decoding step of a generating request verifies one useless token: SmolLM2 generated 252 tokens/s
with 32 requests in flight instead of 430 or more on two cores. This proposer caches the states
and proposes nothing, so one server generates at full speed and extracts.

Model Runner V1 only; the V2 runner of accelerators keeps vLLM's own proposer.

The cache shrinks to what its memory node has free, where vLLM would refuse to start: a smaller one
holds fewer of the states that generate left behind, and changes no result. A virtual machine that
is given its memory as it asks for it shows a node of 9 GiB on 24.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
from vllm.v1.worker.cpu_worker import CPUWorker

logger = init_logger("vllm.dspark_pipeline")
LARGEST_SHARE = 0.75  # of the node's free memory


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

    def determine_available_memory(self) -> int:
        asked = self.cache_config.kv_cache_memory_bytes
        node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
        if asked is not None and asked > (most := int(node.available_memory * LARGEST_SHARE)):
            logger.warning(
                "A KV cache of %.1f GiB does not fit the %.1f GiB that this memory node has free; "
                "%.1f GiB are used (extract.kv_cache_gib in services.yaml).",
                *(size / 2**30 for size in (asked, node.available_memory, most)),
            )
            self.cache_config.kv_cache_memory_bytes = most
        return super().determine_available_memory()
