"""From a task's question to the tokens the model sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rljob_trainer.errors import BadInput


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """`tokenizer`: a Hugging Face tokenizer; the other fields are the manifest's."""

    tokenizer: Any
    template: str = "{question}"
    system_prompt: str | None = None
    chat_template: Literal["Auto", "Always", "Never"] = "Auto"

    def __post_init__(self) -> None:
        has_template = bool(self.tokenizer.chat_template)
        if self.chat_template == "Always" and not has_template:
            raise BadInput("task.chatTemplate is Always, but the model's tokenizer has none; write Auto or Never")
        if self.system_prompt is not None and not has_template:
            raise BadInput(
                "task.systemPrompt needs a chat template, and the model's tokenizer has none; "
                "put the text into task.promptTemplate"
            )

    def tokens(self, question: str) -> tuple[str, list[int]]:
        """The prompt as text and as token ids, with the template's or the tokenizer's own special tokens."""
        text = self.template.replace("{question}", question)
        if self.chat_template == "Never" or not self.tokenizer.chat_template:
            return text, list(self.tokenizer(text).input_ids)
        messages = [{"role": "user", "content": text}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        chat = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # The template has written the special tokens already.
        return chat, list(self.tokenizer(chat, add_special_tokens=False).input_ids)
