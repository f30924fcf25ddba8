"""The parity canary: a few samples' states from the server against transformers' own.

It tells a wrong layer, final norm, template or model, and a broken attention backend, from
bfloat16's rounding before thousands of samples are extracted. Cost: the target loaded once more in
float32 and one forward pass a sample.

T tokens, P planes, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stages.states.source import Sample, Source


def chosen(samples: Sequence[Sample], *, count: int) -> list[Sample]:
    """`count` samples spread over the lengths, the longest one among them."""
    by_length = sorted(samples, key=lambda sample: sample["num_tokens"], reverse=True)
    count = min(count, len(samples))
    return [by_length[i * len(samples) // count] for i in range(count)]


def relative_errors(found: Tensor, expected: Tensor) -> list[float]:
    """Of each plane, by Frobenius norm. found, expected: [T, P, H]."""
    difference = (found.float() - expected).norm(dim=(0, 2))
    return [float(error) for error in difference / expected.norm(dim=(0, 2)).clamp(min=1e-12)]


def check(
    source: Source,
    samples: Sequence[Sample],
    *,
    target: Path,
    layer_ids: Sequence[int],
    limit: float,
    trust_remote_code: bool = False,
) -> list[float]:
    """The largest relative error of each plane over the samples, printed.

    Raises ValueError with the numbers where one is above `limit`, or a sample was rejected.
    """
    model = _load(target, trust_remote_code=trust_remote_code)
    worst = [0.0] * source.num_planes
    with source.read(samples) as states:
        for sample, loaded in zip(samples, states, strict=True):
            if loaded is None:
                raise ValueError(
                    f"canary: sample {sample['id']} was rejected; the server's log says more"
                )
            expected = _states(model, sample["input_ids"], layer_ids)
            errors = relative_errors(loaded.states, expected)
            worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    names = [*map(str, layer_ids), "last"]
    table = ", ".join(f"{name}: {error:.4f}" for name, error in zip(names, worst, strict=True))
    print(f"canary: relative error by plane over {len(samples)} samples: {table}", flush=True)
    if not max(worst) <= limit:
        raise ValueError(
            f"canary: the server's states are not those of {target}: relative error by plane "
            f"{table}, at most {limit} expected (extract.canary_limit). All planes off: another "
            "model, template or a broken attention backend; one plane off: another layer; the "
            "last one alone: it must be taken before the final norm"
        )
    return worst


def _load(target: Path, *, trust_remote_code: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    return model.eval()


def _states(model: torch.nn.Module, input_ids: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
    """float32 [T, P, H]; the last plane is what enters the final norm."""
    norms = [module for name, module in model.named_modules() if name.endswith("model.norm")]
    if len(norms) != 1:
        raise ValueError(f"canary: expected one final norm named model.norm, found {len(norms)}")
    final: list[Tensor] = []
    hook = norms[0].register_forward_pre_hook(lambda _, inputs: final.append(inputs[0]))
    try:
        with torch.inference_mode():
            states = model(torch.tensor([input_ids]), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    return torch.stack([*(states[k][0] for k in layer_ids), final[0][0]], dim=1)
