"""vLLM's own Qwen3DSparkForCausalLM in float32 on CPU: what the load gate compares with.

    python -m stages.serving.reference --package DIR --target DIR --samples FILE --out FILE

A process of its own, so that the stage that asks stays free of vLLM. The class is loaded from the
package folder as vLLM's server loads it and run outside an engine. --samples (safetensors) holds,
for i = 0, 1, ..., planes_<i> [T, A*H] (captured states), input_ids_<i> int64 [T] and anchors_<i>
int64 [n]: positions whose token starts a block. --out (safetensors) gets tokens_<i> int64 [n, N],
logits_<i> float32 [n, N, Vd] with the Markov bias, and confidences_<i> float32 [n, N].

Cost: the import of vLLM (about 10 s), loading (about 3 s), milliseconds a block.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.serving.speculative import read_drafter_config
from stages.weights import load_target_weights

KV_BLOCK_SIZE = 32  # vLLM's CPU attention takes multiples of 32


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.serving.reference")
    for name in ("package", "target", "samples", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    samples = load_file(arguments.samples)
    drafted = draft(samples, package=arguments.package, target=arguments.target)
    save_file(drafted, arguments.out)


@torch.inference_mode()
def draft(samples: dict[str, Tensor], *, package: Path, target: Path) -> dict[str, Tensor]:
    """Drafts every block of `samples`; keys and shapes as in the module's docstring."""
    num_samples = sum(name.startswith("planes_") for name in samples)
    longest = max(samples[f"planes_{i}"].shape[0] for i in range(num_samples))
    model = _Model(package, target=target, max_tokens=longest)
    drafted: dict[str, Tensor] = {}
    for i in range(num_samples):
        planes, input_ids = samples[f"planes_{i}"].float(), samples[f"input_ids_{i}"]
        blocks = [
            model.block(planes[:anchor], anchor_token=int(input_ids[anchor]))
            for anchor in samples[f"anchors_{i}"].tolist()
        ]
        for name in ("tokens", "logits", "confidences"):
            drafted[f"{name}_{i}"] = torch.cat([getattr(block, name) for block in blocks])
    return drafted


class _Model:
    """The loaded draft model with key-value caches for one sequence."""

    def __init__(self, package: Path, *, target: Path, max_tokens: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()
        config = read_drafter_config(package)
        self._num_slots, self._mask = config.block_size, config.mask_token_id
        self._num_blocks = -(-(max_tokens + config.block_size) // KV_BLOCK_SIZE)
        self._config = EngineArgs(
            model=str(target),
            dtype="float32",
            max_model_len=min(
                (self._num_blocks + 1) * KV_BLOCK_SIZE, config.max_position_embeddings
            ),
            block_size=KV_BLOCK_SIZE,
            enforce_eager=True,
            speculative_config={
                "method": "dflash",
                "model": str(package),
                "num_speculative_tokens": config.block_size,
            },
        ).create_engine_config()
        self._load(target)
        self._bind_caches()

    def block(self, planes: Tensor, *, anchor_token: int) -> Any:
        """The Block (proposer.py, B = 1) after the context `planes` [T, A*H] and the anchor."""
        from vllm.forward_context import set_forward_context

        from stages.serving.blocks import draft_block

        num_context, num_slots = planes.shape[0], self._num_slots
        # Block j of the table is block j of the cache, so a slot's index is its position.
        context = torch.arange(num_context)
        slots = num_context + torch.arange(num_slots)
        input_ids = torch.full((num_slots,), self._mask, dtype=torch.int32)
        input_ids[0] = anchor_token
        states = self.model.combine_hidden_states(planes)
        self.model.precompute_and_store_context_kv(states, context, context)
        metadata = self._attention_metadata(num_context=num_context, slots=slots)
        with set_forward_context(
            metadata,
            self._config,
            num_tokens=num_slots,
            slot_mapping=dict.fromkeys(metadata, slots),
        ):
            hidden = self.model(input_ids=input_ids, positions=slots, inputs_embeds=None)
        return draft_block(self.model, hidden.unsqueeze(0), anchors=input_ids[:1])

    def _load(self, target: Path) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import (
            ensure_model_parallel_initialized,
            init_distributed_environment,
        )
        from vllm.model_executor.model_loader import get_model

        from stages.serving.blocks import norm_context_keys_by_layer

        speculative = self._config.speculative_config
        assert speculative is not None
        with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(self._config):
            init_distributed_environment(
                world_size=1,
                rank=0,
                local_rank=0,
                distributed_init_method=f"file://{folder}/rendezvous",
                backend="gloo",
            )
            ensure_model_parallel_initialized(1, 1)
            self.model: Any = get_model(
                vllm_config=self._config, model_config=speculative.draft_model_config
            )
        norm_context_keys_by_layer(self.model)
        weights = load_target_weights(target)
        embedding = self.model.model.embed_tokens
        embedding.weight_loader(embedding.weight, weights.embedding.float())
        if not self.model.has_own_lm_head:
            head = self.model.lm_head
            head.weight_loader(head.weight, weights.lm_head.float())
            # The CPU build multiplies by a packed copy, made when the model was loaded.
            head.quant_method.process_weights_after_loading(head)

    def _bind_caches(self) -> None:
        layers = [layer.self_attn.attn for layer in self.model.model.layers]
        specs = [layer.get_kv_cache_spec(self._config) for layer in layers]
        for layer, spec in zip(layers, specs, strict=True):
            layer.bind_kv_cache(
                torch.zeros(self._num_blocks, spec.num_kv_heads, KV_BLOCK_SIZE, 2 * spec.head_size)
            )
        self._layer_names = [layer.layer_name for layer in layers]
        builder = layers[0].get_attn_backend().get_builder_cls()
        self._builder: Any = builder(specs[0], self._layer_names, self._config, torch.device("cpu"))

    def _attention_metadata(self, *, num_context: int, slots: Tensor) -> dict[str, Any]:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        num_slots = self._num_slots
        starts = torch.tensor([0, num_slots], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([num_context + num_slots], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=num_slots,
            max_query_len=num_slots,
            max_seq_len=num_context + num_slots,
            block_table_tensor=torch.arange(self._num_blocks, dtype=torch.int32).unsqueeze(0),
            slot_mapping=slots,
            causal=False,
        )
        metadata = self._builder.build(0, common)
        return dict.fromkeys(self._layer_names, metadata)


if __name__ == "__main__":
    main()
