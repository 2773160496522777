"""Arguments of the built-in tasks."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from rljob_api.api_model import ApiModel


class DigitsArgs(ApiModel):
    """Arguments of digits: none. Its ten prompts are fixed, and responses have algorithm.maxResponseTokens."""


class ReasoningGymArgs(ApiModel):
    """Arguments of reasoning-gym: a data set, and its settings (`max_terms`, `min_digits`, …), which are passed on."""

    model_config = ConfigDict(extra="allow")

    dataset: str = Field(min_length=1, max_length=253)
    """Name of a reasoning-gym data set, such as chain_sum."""

    size: int = Field(default=10_000, ge=1, le=2**31 - 1)
    """Number of items. Items are generated when they are drawn, so a large number costs nothing."""

    @property
    def dataset_settings(self) -> dict[str, Any]:
        """Settings of the data set other than its size and seed."""
        return dict(self.model_extra or {})


class JsonlArgs(ApiModel):
    """Arguments of jsonl: a file of prompts in UTF-8, with one JSON object per line."""

    path: str = Field(min_length=1, max_length=4096)
    """Path of the file. A relative path starts at the manifest's directory, in pods at task.files."""

    prompt_field: str = Field(default="prompt", min_length=1, max_length=253)
    """Field with the prompt, as text."""

    answer_field: str = Field(default="answer", min_length=1, max_length=253)
    """Field with the answer. Lines may omit it if the reward function does not need it."""


TaskArgs = DigitsArgs | ReasoningGymArgs | JsonlArgs

ARGS_OF_TASK: dict[str, type[TaskArgs]] = {
    "digits": DigitsArgs,
    "reasoning-gym": ReasoningGymArgs,
    "jsonl": JsonlArgs,
}
