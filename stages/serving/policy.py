"""What the proposer decides each round: whether to draft at all, and how many of its drafts each
request has verified. No vLLM import.

The rules are named as in params.yaml (serve.scheduler): `prefix` is the hardware-aware scheduler
(stages/dspark/scheduler.py), `fixed` verifies num_draft_tokens, `threshold` cuts a block before the
first slot whose survival is below serve.threshold; `none` never drafts.

The draft pass costs time whatever becomes of its drafts, so `prefix` also decides before it whether
to run: it takes the blocks drafted lately for what the next ones will be like, which depends on
nothing that is drafted now. It looks again every EVERY rounds of the same batch size. After PROBE
rounds of one kind comes one of the other: so it learns when the text becomes predictable, and what
rounds of either kind take.

The cost table was measured with an idle engine. What rounds take beyond it (scheduling, sampling,
answering over HTTP: 4 ms of 28 with eight requests on two cores, 10 of 43 where they draft) is
learnt from the rounds themselves, apart for those that draft and those that do not.

R requests, N slots.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from stages.dspark.calibration import calibrated
from stages.dspark.scheduler import (
    NO_OVERHEAD,
    CostTable,
    Overhead,
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
TIMED = 32  # rounds whose median tells the overhead; prefills are the minority among them
MARGIN = 1.03  # of the expected gain: in a step with a prefill a draft costs more than is known


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
        self._round = 0
        self._drafted = False  # in the latest round
        self._alike = 0  # rounds before it that answered as it did
        self._excess: dict[bool, deque[float]] = {
            drafted: deque(maxlen=TIMED) for drafted in (True, False)
        }
        self.scheduler = ""
        self.switch(scheduler)

    def switch(self, scheduler: str) -> None:
        """Takes effect at the next round. Raises ValueError for an unknown name."""
        if scheduler not in SCHEDULERS:
            raise ValueError(f"draft scheduler {scheduler!r}: expected one of {SCHEDULERS}")
        self.scheduler = scheduler
        self._decided.clear()

    def took(self, seconds: float, *, num_requests: int, num_tokens: int) -> None:
        """From the start of the latest round to that of the next, which had `num_tokens`."""
        self.statistics.elapsed_s += seconds
        costs = self.costs
        if costs is not None and num_tokens <= num_requests * (1 + self.num_slots):
            known = costs.step(num_tokens)
            if self._drafted:
                known += costs.draft(num_requests)
            self._excess[self._drafted].append(seconds - known)

    @property
    def overhead(self) -> Overhead:
        """What is known of it; where rounds of one kind are missing, that of the other."""
        drafting, idle = (self._excess[drafted] for drafted in (True, False))
        if not drafting and not idle:
            return NO_OVERHEAD
        return Overhead(statistics.median(drafting or idle), statistics.median(idle or drafting))

    def wants_draft(self, num_requests: int) -> bool:
        """Before a round's draft pass: whether `num_requests` that decode should have one."""
        self.statistics.rounds += 1
        self.statistics.requests += num_requests
        self._round += 1
        answer = self.scheduler != "none"
        if self.scheduler == "prefix" and self.costs is not None and len(self._recent) >= FEWEST:
            pays = self._pays(num_requests, self.costs)
            answer = pays if self._alike < PROBE else not self._drafted
        self._alike = self._alike + 1 if answer == self._drafted else 0
        self._drafted = answer
        return answer

    def _pays(self, num_requests: int, costs: CostTable) -> bool:
        """Whether drafting is expected to be faster than not."""
        decided, answer = self._decided.get(num_requests, (-EVERY, True))
        if self._round - decided >= EVERY:
            gain = draft_gain(
                self._recent, num_requests=num_requests, costs=costs, overhead=self.overhead
            )
            answer = gain > MARGIN
            self._decided[num_requests] = (self._round, answer)
        return answer

    def lengths(self, confidences: Tensor, *, may_draft: Tensor) -> list[int]:
        """How many drafts of each request to verify.

        confidences: float32 [R, N]; may_draft: bool [R], False for a request that is still being
        prefilled or is too near the length limit for a block.
        """
        self.statistics.drafted_rounds += 1
        survivals = survival(calibrated(confidences, self._temperatures))
        self._recent = torch.cat([survivals[may_draft], self._recent])[:RECENT]
        survivals = survivals * may_draft.unsqueeze(-1)
        if self.scheduler == "threshold":
            chosen = threshold_lengths(survivals, threshold=self.threshold)
        elif self.scheduler == "prefix" and self.costs is not None:
            chosen = admit(survivals, self.costs, self.overhead)
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
