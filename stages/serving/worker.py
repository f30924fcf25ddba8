"""vLLM's CPU worker with the DSpark proposer: `--worker-cls stages.serving.worker.DSparkWorker`.

Without it vLLM accepts a DSpark package under the method `dflash` and serves it in the wrong layout
without a word, so the active proposer is logged and anything but a DSpark package is refused.
"""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from stages.serving.proposer import DSparkProposer, PackageMismatch

logger = init_logger("vllm.dspark_pipeline")


class DSparkWorker(CPUWorker):
    """Replaces the stock drafter before anything is loaded into it."""

    def init_device(self) -> None:
        super().init_device()
        speculative = self.vllm_config.speculative_config
        if speculative is None or speculative.method != "dflash":
            found = None if speculative is None else speculative.method
            raise PackageMismatch(
                "DSparkWorker needs --speculative-config with the method 'dflash', found "
                f"{found!r}; stages/serving/speculative.py writes the right one"
            )
        proposer = DSparkProposer(self.vllm_config, self.device, self.model_runner)
        self.model_runner.drafter = proposer
        logger.info(
            "Active proposer: %s, package %s, %d draft tokens a round",
            type(proposer).__name__,
            speculative.model,
            proposer.num_speculative_tokens,
        )
