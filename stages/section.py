"""A frozen section of a settings file, and the number types that sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A frozen section of a settings file; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
