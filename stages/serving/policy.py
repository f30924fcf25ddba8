"""What the proposer decides each round: whether to draft at all, and how many of its drafts each
request has verified. No vLLM import.

The rules are named as in params.yaml (serve.scheduler): `prefix` is the hardware-aware scheduler
(stages/dspark/scheduler.py), `fixed` verifies num_draft_tokens, `threshold` cuts a block before the
first slot whose survival is below serve.threshold; `none` never drafts.

The draft pass costs time whatever becomes of its drafts, so `prefix` also decides before it whether
to run: it takes the blocks drafted lately for what the next ones will be like, which depends on
nothing that is drafted now. It looks again every EVERY rounds of the same batch size, and drafts
one round in PROBE while it does not, so that it learns when the text becomes predictable.

R requests, N slots.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from stages.dspark.calibration import calibrated
from stages.dspark.scheduler import (
    CostTable,
    admit,
    draft_gain,
    fixed_lengths,
    survival,
    threshold_lengths,
)

SCHEDULERS = ("prefix", "fixed", "threshold", "none")
RECENT = 64  # blocks that tell what drafting is worth
FEWEST = 16  # below it, drafting is tried
EVERY = 16
PROBE = 64


@dataclass
class Statistics:
    """Sums since the server started, or since they were last taken."""

    rounds: int = 0  # steps with a request that decodes
    drafted_rounds: int = 0  # of them with a draft pass
    requests: int = 0  # over all rounds
    drafted_per_slot: list[int] = field(default_factory=list)  # verified, not merely drafted
    decision_s: float = 0.0
    draft_s: float = 0.0  # draft passes, context included
    context_s: float = 0.0  # context written in rounds without a draft pass
    elapsed_s: float = 0.0  # between the starts of successive rounds


class DraftPolicy:
    """The rule in force and what it has seen."""

    def __init__(
        self,
        *,
        scheduler: str,
        num_slots: int,
        threshold: float,
        temperatures: list[float] | None = None,
    ) -> None:
        """temperatures: of calibration.json, a slot each; None leaves confidences as they are."""
        self.num_slots, self.threshold = num_slots, threshold
        self.costs: CostTable | None = None
        self.statistics = Statistics(drafted_per_slot=[0] * num_slots)
        self._temperatures = torch.tensor(temperatures or [1.0] * num_slots)[:num_slots]
        self._recent = torch.empty(0, num_slots, dtype=torch.float64)
        self._decided: dict[int, tuple[int, bool]] = {}  # requests -> (round, draft or not)
        self._round = self._idle = 0
        self.scheduler = ""
        self.switch(scheduler)

    def switch(self, scheduler: str) -> None:
        """Takes effect at the next round. Raises ValueError for an unknown name."""
        if scheduler not in SCHEDULERS:
            raise ValueError(f"draft scheduler {scheduler!r}: expected one of {SCHEDULERS}")
        self.scheduler = scheduler
        self._decided.clear()

    def wants_draft(self, num_requests: int) -> bool:
        """Before a round's draft pass: whether `num_requests` that decode should have one."""
        self.statistics.rounds += 1
        self.statistics.requests += num_requests
        self._round += 1
        if self.scheduler != "prefix":
            return self.scheduler != "none"
        if self.costs is None or len(self._recent) < FEWEST or self._idle >= PROBE:
            return True
        decided, answer = self._decided.get(num_requests, (-EVERY, True))
        if self._round - decided >= EVERY:
            gain = draft_gain(self._recent, num_requests=num_requests, costs=self.costs)
            answer = gain > 1.0
            self._decided[num_requests] = (self._round, answer)
        self._idle = 0 if answer else self._idle + 1
        return answer

    def lengths(self, confidences: Tensor, *, may_draft: Tensor) -> list[int]:
        """How many drafts of each request to verify.

        confidences: float32 [R, N]; may_draft: bool [R], False for a request that is still being
        prefilled or is too near the length limit for a block.
        """
        self._idle = 0
        self.statistics.drafted_rounds += 1
        survivals = survival(calibrated(confidences, self._temperatures))
        self._recent = torch.cat([survivals[may_draft], self._recent])[:RECENT]
        survivals = survivals * may_draft.unsqueeze(-1)
        if self.scheduler == "threshold":
            chosen = threshold_lengths(survivals, threshold=self.threshold)
        elif self.scheduler == "prefix" and self.costs is not None:
            chosen = admit(survivals, self.costs)
        else:
            chosen = fixed_lengths(survivals, length=self.num_slots)
        chosen = chosen * may_draft
        counted = chosen.tolist()
        for length in counted:
            for slot in range(length):
                self.statistics.drafted_per_slot[slot] += 1
        return counted

    def take_statistics(self) -> dict[str, Any]:
        """The sums, which start anew."""
        taken = asdict(self.statistics)
        self.statistics = Statistics(drafted_per_slot=[0] * self.num_slots)
        return taken
