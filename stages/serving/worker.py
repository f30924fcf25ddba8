"""vLLM's CPU worker with the DSpark proposer: `--worker-cls stages.serving.worker.DSparkWorker`.

Without it vLLM accepts a DSpark package under the method `dflash` and serves it in the wrong layout
without a word, so the active proposer is logged and anything but a DSpark package is refused.

The policy comes from `--additional-config '{"dspark": {...}}'` (speculative.py writes it). Methods
without an underscore can be called through vLLM's collective_rpc, which its server offers over HTTP
with VLLM_SERVER_DEV_MODE=1 alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from stages.dspark.scheduler import CostTable
from stages.serving.costs import measure_costs
from stages.serving.policy import DraftPolicy
from stages.serving.proposer import DSparkProposer, PackageMismatch
from stages.serving.sampler import DraftSampler, mend_expansion
from stages.serving.speculative import read_temperatures

logger = init_logger("vllm.dspark_pipeline")


class DSparkWorker(CPUWorker):
    """Replaces the stock drafter before anything is loaded into it."""

    proposer_class = DSparkProposer

    def init_device(self) -> None:
        super().init_device()
        speculative = self.vllm_config.speculative_config
        if speculative is None or speculative.method != "dflash":
            found = None if speculative is None else speculative.method
            raise PackageMismatch(
                "DSparkWorker needs --speculative-config with the method 'dflash', found "
                f"{found!r}; stages/serving/speculative.py writes the right one"
            )
        given = self.vllm_config.additional_config
        settings = given.get("dspark") if isinstance(given, dict) else None
        if settings is None:
            raise PackageMismatch(
                'DSparkWorker needs --additional-config \'{"dspark": {"scheduler": ..., '
                '"threshold": ...}}\'; `make serve PACKAGE=...` starts a server with it'
            )
        temperatures = read_temperatures(Path(speculative.model))
        policy = DraftPolicy(
            scheduler=settings["scheduler"],
            threshold=settings["threshold"],
            num_slots=speculative.num_speculative_tokens,
            temperatures=temperatures,
        )
        runner = self.model_runner
        proposer = self.proposer_class(self.vllm_config, self.device, runner, policy=policy)
        runner.drafter = proposer
        mend_expansion()
        runner.rejection_sampler = DraftSampler(runner.sampler, speculative, self.device)
        # vLLM drafts zeros for the whole batch, and counts them, once a sequence is within a block
        # of the limit. Ours drafts nothing for that sequence alone.
        runner.effective_drafter_max_model_len += 2 * (proposer.num_speculative_tokens + 1)
        logger.info(
            "Active proposer: %s, package %s, %d draft tokens a round, scheduler %s, "
            "confidences %s",
            type(proposer).__name__,
            speculative.model,
            proposer.num_speculative_tokens,
            policy.scheduler,
            "as they are" if temperatures is None else "calibrated",
        )

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self._measure_costs()
        return times

    def switch_draft_scheduler(self, scheduler: str) -> dict[str, str]:
        """Another rule from the next round on: prefix, fixed, threshold or none."""
        self._policy.switch(scheduler)
        self._measure_costs()
        return {"scheduler": scheduler}

    def take_draft_statistics(self) -> dict[str, Any]:
        """policy.Statistics since they were last taken."""
        return self._policy.take_statistics()

    @property
    def _policy(self) -> DraftPolicy:
        policy: DraftPolicy = self.model_runner.drafter.policy
        return policy

    def _measure_costs(self) -> None:
        """Once, and only for the rule that needs them. Nothing may be running."""
        if self._policy.scheduler != "prefix" or self._policy.costs is not None:
            return
        started = time.perf_counter()
        runner = self.model_runner
        steps, drafts = measure_costs(runner, runner.drafter)
        self._policy.costs = CostTable(
            step_s=steps,
            draft_s=drafts,
            max_tokens=runner.max_num_reqs * (1 + self._policy.num_slots),
        )
        logger.info(
            "Draft costs, measured in %.1f s: target step %s ms by tokens, draft pass %s ms by "
            "requests",
            time.perf_counter() - started,
            {n: round(1e3 * s, 1) for n, s in steps.items()},
            {n: round(1e3 * s, 1) for n, s in drafts.items()},
        )
