"""Formats questions and conversations as prompts: text and tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rljob_client.errors import BadInput
from rljob_trainer.tasks.item_fields import Conversation
from rljob_trainer.tasks.user_code import short_repr

_PROBE, _SYSTEM_PROBE = "This is the question.", "This is the instruction."
"""Messages with which a chat template is tried out."""

_QUESTION = "{question}"

_NEVER = "correct the template, or write task.chatTemplate: Never"

_DATE = (
    "The chat template of the tokenizer writes the date into prompts: those of a resumed run differ from those of an "
    "earlier day. For the same prompts on all days, write a fixed date into the template"
)


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Formats questions as prompts. The fields, except the tokenizer, are those of the manifest."""

    tokenizer: Any
    """A Hugging Face tokenizer."""

    template: str = _QUESTION
    system_prompt: str | None = None
    chat_template: Literal["Auto", "Always", "Never"] = "Auto"
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)

    vocabulary: int | None = None
    """Rows of the model's embedding, which every token id must be below; None: not checked."""

    def __post_init__(self) -> None:
        has_template = bool(self.tokenizer.chat_template)
        if self.chat_template == "Always" and not has_template:
            raise BadInput(
                "task.chatTemplate: Always needs a tokenizer with a chat template, found none; write Auto or Never"
            )
        if self.system_prompt is not None and not has_template:
            raise BadInput(
                "task.systemPrompt: expected a tokenizer with a chat template, found none; "
                "put the text into task.promptTemplate"
            ).at("spec", "task", "systemPrompt")
        if self.chat_template_args and not has_template:
            raise BadInput(
                "task.chatTemplateArgs: expected a tokenizer with a chat template, found none; remove the field"
            ).at("spec", "task", "chatTemplateArgs")
        if self.system_prompt is not None and not self._is_chat:
            raise BadInput(
                "task.systemPrompt: expected task.chatTemplate: Auto or Always, found Never, which leaves it out; "
                "put the text into task.promptTemplate"
            ).at("spec", "task", "systemPrompt")
        if self.vocabulary is not None and (end := self.tokenizer.eos_token_id or 0) >= self.vocabulary:
            raise BadInput(
                f"expected the end-of-sequence token of the tokenizer below {self.vocabulary}, the rows of the model's "
                f"embedding, found {end} ({self.tokenizer.eos_token!r}): no response would end; correct eos_token in "
                f"{Path(self.tokenizer.name_or_path) / 'tokenizer_config.json'}"
            )
        if self._is_chat:
            self._require_complete_chat()

    def tokens(self, question: str | Conversation) -> tuple[str, list[int]]:
        """The prompt as text and as token ids, including the special tokens of template or tokenizer, but no token
        after the text. Raises `BadInput`."""
        if isinstance(question, str):
            text = self.template.replace(_QUESTION, question)
            if not self._is_chat:
                return text, self._open(text)
            chat = self._rendered([_user(text)], self.system_prompt)
        else:
            chat = self._chat(question)
        # The template has already added the special tokens.
        return chat, self._encoded(chat, special=False)

    def warnings(self) -> list[str]:
        """Messages about a chat template whose prompts may be a mistake: they contain the day on which they are made,
        so that another attempt may have others, or end with the end-of-sequence token."""
        if not self._is_chat:
            return []
        template = self.tokenizer.get_chat_template(tools=self.chat_template_args.get("tools"))
        found = [_DATE] if "strftime_now" in template else []
        if unread := [name for name in self.chat_template_args if not re.search(rf"\b{re.escape(name)}\b", template)]:
            found.append(
                f"The chat template of the tokenizer does not read {', '.join(unread)} (task.chatTemplateArgs): "
                "correct the name, or remove it"
            )
        text, end = self._rendered([_user(_PROBE)], None), self.tokenizer.eos_token
        if end and text.rstrip().endswith(end):
            found.append(
                f"The chat template of the tokenizer ends prompts with the end-of-sequence token {end!r}: the model "
                "may answer nothing. Write the beginning of an answer after it if add_generation_prompt is set, unless "
                "the model was trained without one"
            )
        return found

    @property
    def _is_chat(self) -> bool:
        return self.chat_template != "Never" and bool(self.tokenizer.chat_template)

    def _require_complete_chat(self) -> None:
        """Raise `BadInput` if the chat template refuses a message, or leaves one out."""
        try:
            chat = self._rendered([_user(_PROBE)], None if self.system_prompt is None else _SYSTEM_PROBE)
        except BadInput as error:
            if self.system_prompt is None:
                raise
            self._rendered([_user(_PROBE)], None)
            raise self._no_system_message(f"refuses one ({error.__cause__})") from error
        if _PROBE not in chat:
            raise BadInput(f"expected {self._chat_file} to contain the user's message, found it left out; {_NEVER}")
        if self.system_prompt is not None and _SYSTEM_PROBE not in chat:
            raise self._no_system_message("leaves it out")

    def _no_system_message(self, found: str) -> BadInput:
        return BadInput(
            f"task.systemPrompt: expected a tokenizer whose chat template accepts a system message, found one that "
            f"{found}; put the text into task.promptTemplate"
        ).at("spec", "task", "systemPrompt")

    def _chat(self, conversation: Conversation) -> str:
        """The conversation as text, up to the place where the model continues."""
        if not self._is_chat:
            found = "none" if not self.tokenizer.chat_template else "task.chatTemplate: Never"
            raise BadInput(
                f"expected a tokenizer with a chat template for the prompt, which is a conversation, found {found}; "
                "use a model with a chat template, or write the prompts as text"
            )
        messages = list(conversation)
        if self.template != _QUESTION:
            last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
            if last is None:
                raise BadInput(
                    "expected a message of the user for task.promptTemplate, found none in the conversation; remove "
                    "promptTemplate, or add the message"
                )
            text = self.template.replace(_QUESTION, messages[last]["content"])
            messages[last] = {**messages[last], "content": text}
        has_system = messages[0]["role"] in ("system", "developer")
        chat = self._rendered(
            messages, None if has_system else self.system_prompt, "correct the template or the prompt"
        )
        for message in messages:
            if message["role"] in ("system", "user") and message["content"].strip() not in chat:
                raise BadInput(
                    f"expected {self._chat_file} to contain each message, found one of the {message['role']} left out "
                    f"({short_repr(message['content'])}); correct the template, or leave out the message"
                )
        return chat

    def _rendered(self, messages: Conversation, system_prompt: str | None, advice: str = _NEVER) -> str:
        """The messages after the system message, if any. The model continues a last message of the assistant."""
        if system_prompt is not None:
            messages = [{"role": "system", "content": system_prompt}, *messages]
        continues = messages[-1]["role"] == "assistant"
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    **self.chat_template_args,
                    tokenize=False,
                    add_generation_prompt=not continues,
                    continue_final_message=continues,
                )
            )
        except Exception as error:  # a template is a program
            raise BadInput(
                f"expected a prompt from {self._chat_file}, found {type(error).__name__}: {error}; {advice}"
            ) from error

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        try:
            token_ids = list(self.tokenizer(text, add_special_tokens=special).input_ids)
        except Exception as error:  # the tokenizers library raises plain Exception
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise BadInput(
                    f"expected text that can be written as UTF-8, found half of a character in {short_repr(text)}; "
                    "remove it, or do not cut the text within a character"
                ) from error
            raise BadInput(
                f"expected text that the tokenizer can encode, found {short_repr(text)} ({type(error).__name__}: "
                f"{error}); change the text"
            ) from error
        if self.vocabulary is not None and token_ids and (largest := max(token_ids)) >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise BadInput(
                f"expected tokens below {self.vocabulary}, the rows of the model's embedding, found {largest} "
                f"({token!r}) of a tokenizer with {len(self.tokenizer)} tokens in {short_repr(text)}; enlarge the "
                "embedding (resize_token_embeddings of transformers), or remove the token from the prompt"
            )
        return token_ids

    def _open(self, text: str) -> list[int]:
        """The token ids of `text` after the special tokens that the tokenizer puts before it, unless the text has them
        already. Those that it puts after a text are left out: the model is to continue it."""
        plain = self._encoded(text, special=False)
        if not plain or not self.tokenizer.num_special_tokens_to_add():
            return plain
        whole = self._encoded(text, special=True)
        places = (place for place in range(len(whole)) if whole[place : place + len(plain)] == plain)
        start = whole[: next(places, 0)]
        return plain if plain[: len(start)] == start else start + plain

    @property
    def _chat_file(self) -> str:
        """The chat template and its file, for messages."""
        directory = Path(self.tokenizer.name_or_path)
        files = ("chat_template.jinja", "tokenizer_config.json")
        return f"the chat template in {next((directory / f for f in files if (directory / f).is_file()), directory)}"


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
