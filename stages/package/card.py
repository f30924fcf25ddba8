"""The model card of a package. Pure: numbers in, Markdown out."""

from __future__ import annotations

import json
from typing import Any

from stages.dspark.config import DrafterConfig

_CARD = """\
---
library_name: vllm
tags: [speculative-decoding, dspark]
base_model: {target}
license: {license}
---

# {name}

A DSpark drafter for **{target}**, in the speculators format that vLLM loads. It proposes
{block_size} tokens a round, which the target verifies: what comes out is the target's own text.

## Architecture

| | |
|---|---|
| backbone | Qwen3, {num_layers} layer(s), hidden {hidden_size}, intermediate {intermediate_size} |
| attention | {heads} heads ({kv_heads} key-value) of {head_dim} |
| context | hidden states of the target's layers {layer_ids} (transformers' `hidden_states[k]`) |
| block | {block_size} slots, bidirectional; slot 0 holds the anchor (`sample_from_anchor`), the \
others mask token {mask_token_id} |
| draft vocabulary | {draft_vocab_size} of the target's {vocab_size} tokens |
| Markov head | {markov} |
| confidence head | {confidence} |
| weights | bfloat16; the embedding is the target's |

## Training metrics

{metrics}

Validation prompts of the training sources, not the evaluation sets. Acceptance in the real engine
is in the evaluation that the same pipeline run wrote.

## Serving

On a GPU (vLLM's Model Runner V2):

```bash
vllm serve {target} --speculative-config '{gpu}'
```

On a CPU, from a checkout of the pipeline that made this package (`make serve` on a GPU does the
same as the command above):

```bash
make serve PACKAGE=path/to/this/folder
```

It adds a worker class; without that vLLM's CPU engine accepts the folder and drafts in another
layout.

## Licence

The drafter is derived from the target's outputs and shares its logit head; it comes under the
target's licence: {license_text}.

## Provenance

provenance.json names the recipe, the inputs' checksums and the package versions. Before publication
vLLM's own `Qwen3DSparkForCausalLM` was loaded from this folder and its drafts compared with the
trained drafter's in float32.
"""


def _confidence(config: DrafterConfig) -> str:
    if not config.confidence_head:
        return "none"
    return "yes, with the Markov embedding" if config.confidence_head_with_markov else "yes"


def model_card(
    config: DrafterConfig,
    *,
    name: str,
    target: str,
    licence: str | None,
    metrics: dict[str, Any],
) -> str:
    """README.md. `licence` is the target's, None where its files do not state one."""

    speculative = {
        "method": "dspark",
        "model": name,
        "num_speculative_tokens": config.block_size,
    }

    return _CARD.format(
        name=name,
        target=target,
        license=licence or "unknown",
        license_text=licence or "unknown, since the target's files state none",
        block_size=config.block_size,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        layer_ids=", ".join(map(str, config.layer_ids)),
        mask_token_id=config.mask_token_id,
        draft_vocab_size=config.draft_vocab_size,
        vocab_size=config.vocab_size,
        markov=f"{config.markov_head}, rank {config.markov_rank}" if config.markov_rank else "none",
        confidence=_confidence(config),
        metrics=_metrics_table(metrics),
        gpu=json.dumps(speculative),
    )


def _metrics_table(metrics: dict[str, Any]) -> str:
    """Scalars of drafter/metrics.json; what is measured in seconds is left out (it varies)."""
    rows = [
        f"| {key.replace('_', ' ')} | {value:.3f} |"
        if isinstance(value, float)
        else f"| {key.replace('_', ' ')} | {value} |"
        for key, value in metrics.items()
        if isinstance(value, int | float | str) and not key.endswith("_s")
    ]
    return "\n".join(["| metric | value |", "|---|---|", *rows])
