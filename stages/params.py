"""What decides a result (params.yaml) and where things run (services.yaml), typed and checked once.

Neither file has defaults in code: a missing or unknown key is an error that names the file, the key
and what was expected. Imports: the standard library, yaml, pydantic, section.py, services.py,
sources.py and dspark/served.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from stages.dspark.served import check_heads, check_served
from stages.section import Fraction, Positive
from stages.section import Section as Section
from stages.services import Services as Services
from stages.sources import AuthoredSource, Source

PARAMS_FILE = Path("params.yaml")
SERVICES_FILE = Path("services.yaml")

DOMAINS = (
    "HumanEval",
    "math_reasoning",
    "qa",
    "question",
    "rag",
    "summarization",
    "tool_call",
    "translation",
    "writing",
)
"""The nine evaluation domains, in the order of every table, plot and metric."""

Policy = Literal["keep", "drop"]


_Model = TypeVar("_Model", bound=Section)


def strictly_increasing(value: list[int]) -> list[int]:
    if any(b <= a for a, b in itertools.pairwise(value)):
        raise ValueError(f"must be strictly increasing, found {value}")
    return value


class TargetParams(Section):
    source: str
    revision: str | None
    trust_remote_code: bool
    mask_token: str | int


class PrepareParams(Section):
    seed: int
    validation_fraction: Fraction
    max_prompt_tokens: Positive
    num_train_prompts: Positive
    num_evaluation_prompts: Positive
    evaluation_checksum: str | None
    overlap_ngram: Annotated[int, Field(ge=3)]
    max_rejected_fraction: Fraction
    role_map: dict[str, str]
    boilerplate: list[str]
    sources: Annotated[list[Source], Field(min_length=1)]

    @model_validator(mode="after")
    def _known_domains(self) -> PrepareParams:
        for source in self.sources:
            named = source.domains if isinstance(source, AuthoredSource) else [source.domain]
            unknown = sorted(set(named) - set(DOMAINS))
            if unknown:
                raise ValueError(f"unknown domains {unknown}; the nine domains are {list(DOMAINS)}")
        return self


class EngineParams(Section):
    dtype: Literal["bfloat16", "float32", "float16"]
    max_model_len: Positive
    kv_block_size: Positive
    enforce_eager: bool

    @field_validator("kv_block_size")
    @classmethod
    def _multiple_of_32(cls, value: int) -> int:
        if value % 32:
            raise ValueError(f"must be a multiple of 32 (vLLM's CPU attention), found {value}")
        return value


class GenerateParams(Section):
    max_tokens: Positive
    temperature: Annotated[float, Field(ge=0.0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    seed: int
    chat_template_kwargs: dict[str, Any]
    truncated: Policy
    looping: Literal["keep", "cap", "drop"]
    loop_ngram: Positive
    loop_repeats: Annotated[int, Field(ge=2)]
    max_rejected_fraction: Fraction


class ExtractParams(Section):
    mode: Literal["cache", "stream", "tee"]
    encoding: Literal["bfloat16", "bfloat16_zstd", "float8_e4m3"]
    layer_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    byte_budget: Positive
    shard_bytes: Positive
    prompt_tokens: bool
    max_rejected_fraction: Fraction
    max_attempts: Positive
    canary_samples: Annotated[int, Field(ge=0)]
    canary_limit: Annotated[float, Field(gt=0)]

    @field_validator("layer_ids")
    @classmethod
    def _increasing(cls, value: list[int]) -> list[int]:
        return strictly_increasing(value)


class DrafterParams(Section):
    """The drafter's shape; null copies the target's value (dspark/config.py resolves it)."""

    num_layers: Positive
    block_size: Annotated[int, Field(ge=1)]
    num_attention_heads: Positive | None
    num_key_value_heads: Positive | None
    head_dim: Positive | None
    intermediate_size: Positive | None
    draft_vocab_size: Positive | None
    sliding_window: Positive | None
    sliding_layers: list[Annotated[int, Field(ge=0)]]
    markov_head: Literal["vanilla", "gated", "rnn", "none"]
    markov_rank: Annotated[int, Field(ge=0)]
    confidence_head: bool
    confidence_head_with_markov: bool
    experiment: bool

    @model_validator(mode="after")
    def _consistent_and_served(self) -> DrafterParams:
        check_heads(
            markov_head=self.markov_head,
            markov_rank=self.markov_rank,
            confidence_head=self.confidence_head,
            confidence_head_with_markov=self.confidence_head_with_markov,
        )
        check_served(
            markov_head=self.markov_head,
            sliding_layers=self.sliding_layers,
            head_dim=self.head_dim,
            experiment=self.experiment,
        )
        return self

    def shape(self) -> dict[str, Any]:
        """What DrafterConfig.for_target takes."""
        return self.model_dump(exclude={"experiment"})


class TrainParams(Section):
    seed: int
    dtype: Literal["bfloat16", "float32"]
    warm_start: str | None
    warm_start_vocabulary: Literal["refuse", "keep"]
    num_epochs: Positive
    max_steps: Positive | None
    budget_s: Annotated[float, Field(gt=0)] | None
    batch_tokens: Positive
    anchors_per_sample: Positive
    prompt_anchors: bool
    optimizer: Literal["muon", "adamw"]
    muon_momentum: Annotated[float, Field(ge=0, lt=1)]
    muon_weight_decay: Annotated[float, Field(ge=0)]
    learning_rate: Annotated[float, Field(gt=0)]
    warmup_fraction: Fraction
    min_learning_rate_fraction: Fraction
    weight_decay: Annotated[float, Field(ge=0)]
    betas: tuple[float, float]
    max_grad_norm: Annotated[float, Field(gt=0)]
    ce_weight: Annotated[float, Field(ge=0)]
    tv_weight: Annotated[float, Field(ge=0)]
    kl_weight: Annotated[float, Field(ge=0)]
    ce_label: Literal["next_token", "target_argmax"]
    confidence_weight: Annotated[float, Field(ge=0)]
    position_weighting: Literal["decay", "dpace"]
    position_decay: Annotated[float, Field(gt=0, le=1)]
    dpace_smoothing: Fraction
    validations: Positive
    validation_anchors: Positive
    validation_min_blocks: Positive
    validation_replay_samples: Positive
    early_stop_patience: Positive | None
    early_stop_min_gain: Annotated[float, Field(ge=0)]
    divergence_factor: Annotated[float, Field(gt=1)]
    divergence_steps: Positive
    checkpoint_interval_s: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _one_length(self) -> TrainParams:
        if self.max_steps is not None and self.budget_s is not None:
            raise ValueError(
                f"max_steps ({self.max_steps}) and budget_s ({self.budget_s:g}) both say how long "
                "to train; set one of them to null"
            )
        return self


class PackageParams(Section):
    name: str
    gate_prompts: Positive
    token_agreement: Fraction
    logit_tolerance: Annotated[float, Field(gt=0)]
    confidence_tolerance: Annotated[float, Field(gt=0)]
    calibration_min_blocks: Positive
    calibration_max_temperature: Annotated[float, Field(gt=1)]


class ServeParams(Section):
    """How the packaged drafter is served (stages/serving/policy.py)."""

    scheduler: Literal["prefix", "fixed", "threshold", "none"]
    num_draft_tokens: Positive | None
    threshold: Fraction
    draft_sampling: Literal["greedy", "probabilistic"]


class EvaluateParams(Section):
    depth: Literal["core", "full"]
    prompts_per_domain: Positive
    max_tokens: Annotated[int, Field(ge=2)]
    acceptance_concurrency: Positive
    speed_prompts: Positive
    min_speed_tokens: Annotated[int, Field(ge=2)]
    lossless_prompts: Positive
    lossless_tokens: Positive
    bootstrap_resamples: Annotated[int, Field(ge=100)]
    load_concurrencies: Annotated[list[Positive], Field(min_length=1)]
    load_requests: Positive
    sampled_prompts: Positive
    sampled_temperature: Annotated[float, Field(gt=0)]
    context_lengths: Annotated[list[Positive], Field(min_length=1)]
    context_prompts: Positive
    longbench: str | None
    seed: int
    compare_with: str | None

    @field_validator("load_concurrencies", "context_lengths")
    @classmethod
    def _increasing(cls, value: list[int]) -> list[int]:
        return strictly_increasing(value)


class Params(Section):
    """All of params.yaml. Stages read only the sections that dvc.yaml lists for them."""

    target: TargetParams
    prepare: PrepareParams
    engine: EngineParams
    generate: GenerateParams
    extract: ExtractParams
    drafter: DrafterParams
    train: TrainParams
    package: PackageParams
    serve: ServeParams
    evaluate: EvaluateParams


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Reads and checks params.yaml. Raises ValueError naming the file, the key and the fault."""
    return _load(path, Params)


def load_services(path: Path = SERVICES_FILE) -> Services:
    """Reads and checks services.yaml. Raises ValueError naming the file, the key and the fault."""
    return _load(path, Services)


def check_params(values: dict[str, Any], where: str) -> Params:
    """Checks a params mapping that is not (yet) in a file; `where` names it in errors."""
    return _check(values, Params, where)


def _load(path: Path, model: type[_Model]) -> _Model:
    if not path.is_file():
        raise ValueError(f"{path}: no such file in {Path.cwd()}; run from the project's root")
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from None
    return _check(values, model, str(path))


def _check(values: Any, model: type[_Model], where: str) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, fault['loc'])) or '(top)'}: {fault['msg']}"
            + ("" if fault["type"] == "missing" else f", found {fault['input']!r:.80}")
            for fault in error.errors()
        ]
        raise ValueError(f"{where} does not fit:\n" + "\n".join(lines)) from None
