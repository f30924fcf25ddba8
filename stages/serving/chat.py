"""A target's chat template as token ids: the one place where prompts are rendered.

prepare checks lengths with it, generate and evaluate send its ids to the server, so what is
trained on and what is served cannot differ. Needs transformers, not vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class RenderError(ValueError):
    """The chat template refuses a conversation; the message is the template's."""


class Renderer:
    """Renders conversations with the tokenizer in a target's folder.

    Raises ValueError where the folder holds no tokenizer or the tokenizer no chat template.
    """

    def __init__(self, target: Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer  # seconds to import: not for every reader

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                target, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"{target}: expected a tokenizer, found none: {error}") from None
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{target}: its tokenizer has no chat template; add chat_template.jinja to it"
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation, ready for the assistant's turn.

        Raises RenderError where the template refuses it.
        """
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **dict(chat_template_kwargs or {}),
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RenderError(f"the chat template refuses it: {error}") from None
        # The template writes its own special tokens; a tokenizer that adds more would double them.
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(token) for token in ids]
