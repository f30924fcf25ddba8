"""Run by test_proposer.py as a process of its own: the losslessness run with every draft recorded.

    python record_drafts.py SETTINGS OUT      (SETTINGS: keyword arguments of offline.compare)

Besides the tokens it writes, for every pass over one request, the states that the target gave,
where they belong, the anchor and what was drafted; and how mismatched configs are refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from stages.serving import offline, speculative
from stages.serving.proposer import DSparkProposer, PackageMismatch, check_drafter_config
from stages.serving.worker import DSparkWorker

PASSES: list[dict[str, torch.Tensor]] = []


class RecordingProposer(DSparkProposer):
    """Records until the first pass over several requests: from then on states are interleaved."""

    together = False

    def propose(self, *args: Any, **given: Any) -> torch.Tensor:
        drafts = super().propose(*args, **given)
        assert self.last_confidences is not None
        self.together |= len(drafts) > 1
        if not self.together:
            PASSES.append(
                {
                    "states": given["target_hidden_states"].clone(),
                    "positions": given["target_positions"].clone(),
                    "rejected": torch.zeros(1)
                    if given["num_rejected_tokens_gpu"] is None
                    else given["num_rejected_tokens_gpu"].clone(),
                    "anchor": given["next_token_ids"].clone(),
                    "drafts": drafts[0].clone(),
                    "confidences": self.last_confidences[0].clone(),
                }
            )
        return drafts


class RecordingWorker(DSparkWorker):
    def init_device(self) -> None:
        super().init_device()
        # worker.py's logger line has said which proposer it put there; this one records as well.
        self.model_runner.drafter = RecordingProposer(
            self.vllm_config, self.device, self.model_runner
        )


def refusals() -> dict[str, str]:
    good = {
        "architectures": ["Qwen3DSparkModel"],
        "sample_from_anchor": True,
        "markov_head_type": "vanilla",
        "markov_rank": 16,
        "enable_confidence_head": True,
        "block_size": 4,
    }
    check_drafter_config(SimpleNamespace(**good), num_speculative_tokens=4)
    found = {}
    for name, changes, num_tokens in [
        ("dflash", {"architectures": ["DFlashDraftModel"]}, 4),
        ("layout", {"sample_from_anchor": False}, 4),
        ("heads", {"markov_head_type": "gated"}, 4),
        ("windows", {"layer_types": ["full_attention", "sliding_attention"]}, 4),
        ("too many tokens", {}, 5),
    ]:
        try:
            check_drafter_config(
                SimpleNamespace(**{**good, **changes}), num_speculative_tokens=num_tokens
            )
        except PackageMismatch as error:
            found[name] = str(error)
    return found


def main() -> None:
    import record_drafts  # the module that vLLM imports the worker from, not __main__

    settings = json.loads(Path(sys.argv[1]).read_text())
    speculative.WORKER_CLASS = "record_drafts.RecordingWorker"
    result = offline.compare(
        settings.pop("prompts"),
        target=Path(settings.pop("target")),
        package=Path(settings.pop("package")),
        **settings,
    )
    torch.save(
        {"result": result, "passes": record_drafts.PASSES, "refusals": refusals()}, sys.argv[2]
    )


if __name__ == "__main__":
    main()
