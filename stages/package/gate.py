"""The load gate: what vLLM drafts from the package against what the trained drafter drafts.

Both in float32 from the same weights. N slots a block, n blocks a sample, Vd draft vocabulary.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.dspark.config import DrafterConfig
from stages.dspark.draft import Draft, draft_greedy
from stages.dspark.model import Drafter
from stages.package.check import PackageError
from stages.params import PackageParams, Services
from stages.serving.plans import on_cpu, vllm_environment
from stages.weights import TargetWeights


@dataclass(frozen=True)
class Agreement:
    """How far two sets of drafts agree.

    Slots after a block's first differing token are not compared: another token was drafted before
    them. A slot is decided where the best logit leads the second by more than twice the tolerance;
    in the others (near ties) either token is right.
    """

    blocks: int
    slots: int
    compared: int
    near_ties: int  # compared slots that are not decided
    decided_equal: int
    token_agreement: float  # of decided slots; 1.0 where there is none
    logit_error: float  # largest difference, relative to the block's largest logit
    confidence_error: float  # largest difference

    @property
    def decided(self) -> int:
        return self.compared - self.near_ties

    def __str__(self) -> str:
        return (
            f"{self.decided_equal} of {self.decided} decided tokens equal ({self.near_ties} near "
            f"ties, {self.slots - self.compared} slots not compared, {self.blocks} blocks), logits "
            f"within {self.logit_error:.1e} of the largest, confidences within "
            f"{self.confidence_error:.1e}"
        )


def gate_samples(samples: dict[str, Tensor], *, width: int, limit: int) -> dict[str, Tensor]:
    """The first `limit` samples of drafter/gate.safetensors, without the last plane.

    width is A*H, what the drafter reads of a row. Raises ValueError where there is no sample.
    """
    num_samples = min(limit, sum(name.startswith("planes_") for name in samples))
    if num_samples == 0:
        raise ValueError("gate.safetensors of the drafter holds no sample; train it again")
    chosen: dict[str, Tensor] = {}
    for i in range(num_samples):
        chosen[f"planes_{i}"] = samples[f"planes_{i}"][:, :width].contiguous()
        for name in ("input_ids", "anchors"):
            chosen[f"{name}_{i}"] = samples[f"{name}_{i}"]
    return chosen


def trained_drafts(
    samples: dict[str, Tensor],
    *,
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    draft_vocab: Tensor,
    target: TargetWeights,
) -> list[list[Draft]]:
    """Our own drafts in float32, a list a sample: the reference."""
    drafter = Drafter(config).float()
    drafter.load_packaged(tensors)
    embedding = target.embedding.float()
    lm_head = tensors.get("lm_head.weight", target.lm_head).float()
    return [
        [
            draft_greedy(
                drafter,
                embedding=embedding,
                lm_head=lm_head,
                draft_vocab=draft_vocab,
                planes=samples[f"planes_{i}"][:position].float(),
                anchor=int(samples[f"input_ids_{i}"][position]),
            )
            for position in samples[f"anchors_{i}"].tolist()
        ]
        for i in range(sum(name.startswith("planes_") for name in samples))
    ]


def served_drafts(
    samples: dict[str, Tensor], *, package: Path, target: Path, services: Services
) -> list[list[Draft]]:
    """What vLLM's own class drafts from the package folder, in a process of its own.

    Raises PackageError with the end of that process's output where vLLM does not load it.
    """
    if not on_cpu():
        raise PackageError(
            "load gate: compares in float32 on vLLM's CPU build, which is not installed here; run "
            "the package stage in an environment of requirements/cpu.txt"
        )
    # Not in the package's folder: vLLM loads every safetensors file that it finds there.
    with tempfile.TemporaryDirectory(prefix="load-gate-") as scratch:
        given, out = Path(scratch, "samples.safetensors"), Path(scratch, "drafts.safetensors")
        save_file(samples, given)
        command = [sys.executable, "-m", "stages.serving.reference"]
        paths = {"package": package, "target": target, "samples": given, "out": out}
        for name, path in paths.items():
            command += [f"--{name}", str(path.resolve())]
        _run(command, services=services, package=package)
        drafted = load_file(out)
    return [
        [
            Draft(*parts)
            for parts in zip(
                *(drafted[f"{name}_{i}"] for name in ("tokens", "logits", "confidences")),
                strict=True,
            )
        ]
        for i in range(sum(name.startswith("tokens_") for name in drafted))
    ]


def _run(command: list[str], *, services: Services, package: Path) -> None:
    environment = {**os.environ, **vllm_environment(services)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        finished = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=services.vllm.start_timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PackageError(
            f"load gate: vLLM's class took more than {services.vllm.start_timeout_s:.0f} s "
            "(vllm.start_timeout_s)"
        ) from None
    if finished.returncode:
        tail = "\n".join(finished.stdout.splitlines()[-20:])
        raise PackageError(f"load gate: vLLM's class does not run from {package}:\n{tail}")


def compare(
    trained: list[list[Draft]], served: list[list[Draft]], *, logit_tolerance: float
) -> Agreement:
    """Compares block by block; logit_tolerance is relative to a block's largest logit."""
    pairs = [
        pair
        for ours, theirs in zip(trained, served, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    slots = compared = near_ties = equal = 0
    logit_error = confidence_error = 0.0
    for ours, theirs in pairs:
        num_slots = len(ours.tokens)
        same = (ours.tokens == theirs.tokens).tolist()
        shared = min(num_slots, same.index(False) + 1 if False in same else num_slots)
        scale = float(ours.logits.abs().max().clamp(min=torch.finfo(torch.float32).tiny))
        best = ours.logits[:shared].topk(2, dim=-1).values
        decided = (best[:, 0] - best[:, 1]) > 2 * logit_tolerance * scale
        slots, compared = slots + num_slots, compared + shared
        near_ties += int((~decided).sum())
        equal += int((decided & torch.tensor(same[:shared])).sum())
        logit_error = max(
            logit_error, _largest_difference(ours.logits, theirs.logits, shared) / scale
        )
        confidence_error = max(
            confidence_error, _largest_difference(ours.confidences, theirs.confidences, shared)
        )
    decided_slots = compared - near_ties
    return Agreement(
        blocks=len(pairs),
        slots=slots,
        compared=compared,
        near_ties=near_ties,
        decided_equal=equal,
        token_agreement=equal / decided_slots if decided_slots else 1.0,
        logit_error=logit_error,
        confidence_error=confidence_error,
    )


def check_agreement(agreement: Agreement, package: PackageParams) -> dict[str, Any]:
    """The gate's numbers. Raises PackageError, with them, where they are outside params.package."""
    # Written so that a NaN fails.
    passed = (
        agreement.token_agreement >= package.token_agreement
        and agreement.logit_error <= package.logit_tolerance
        and agreement.confidence_error <= package.confidence_tolerance
    )
    if not passed:
        raise PackageError(
            f"load gate: vLLM drafts otherwise than the trained drafter: {agreement}; expected "
            f"token agreement of at least {package.token_agreement}, logits within "
            f"{package.logit_tolerance:.1e}, confidences within {package.confidence_tolerance:.1e}"
        )
    return asdict(agreement)


def _largest_difference(ours: Tensor, theirs: Tensor, shared: int) -> float:
    difference = (ours[:shared] - theirs[:shared]).abs().max()
    return float("inf") if bool(difference.isnan()) else float(difference)
