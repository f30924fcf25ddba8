"""settings.yaml, typed and checked: the numbers that the comparison adds to params.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from stages.params import Fraction, Positive, Section

FILE = Path(__file__).with_name("settings.yaml")

Amount = Annotated[float, Field(ge=0)]
Above = Annotated[float, Field(gt=0)]


class SplitSettings(Section):
    salt: str
    test_fraction: Fraction
    min_test_prompts: Positive


class BudgetSettings(Section):
    timing_steps: Annotated[int, Field(ge=2)]
    timing_fraction: Fraction
    tolerance: Fraction


class PeerSettings(Section):
    """Hyperparameters of speculators' trainer, under its own names where it has one."""

    learning_rate: Above
    optimizer: Literal["muon", "adamw"]
    muon_momentum: Fraction
    muon_weight_decay: Amount
    muon_ns_steps: Positive
    muon_adjust_lr_fn: Literal["match_rms_adamw", "original"]
    weight_decay: Amount
    max_grad_norm: Above
    ce_weight: Amount
    tv_weight: Amount
    confidence_weight: Amount
    decay_gamma: Above
    logit_tolerance: Above


class Settings(Section):
    split: SplitSettings
    budget: BudgetSettings
    peer: PeerSettings


def load_settings(path: Path = FILE) -> Settings:
    """Raises ValueError naming the file and the fault."""
    try:
        return Settings.model_validate(yaml.safe_load(path.read_text()))
    except (ValidationError, yaml.YAMLError) as error:
        raise ValueError(f"{path} does not fit: {error}") from None
