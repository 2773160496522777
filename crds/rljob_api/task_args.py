"""The arguments of the tasks that RLJob brings along."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from rljob_api.api_model import ApiModel


class DigitsArgs(ApiModel):
    """None: the ten prompts of `digits` are fixed, and responses are as long as algorithm.maxResponseTokens."""


class ReasoningGymArgs(ApiModel):
    """Which data set of reasoning-gym, and its own settings (`max_terms`, `min_digits`, …), which are passed on."""

    model_config = ConfigDict(extra="allow")

    dataset: str = Field(min_length=1, max_length=253)
    """Name of a reasoning-gym data set, such as chain_sum."""

    size: int = Field(default=10_000, ge=1, le=2**31 - 1)
    """Items of the data set. They are made when they are drawn, so a large number costs nothing."""

    @property
    def dataset_settings(self) -> dict[str, Any]:
        """What is passed to the data set beside its size and seed."""
        return dict(self.model_extra or {})


class JsonlArgs(ApiModel):
    """A file of prompts, one JSON object a line."""

    path: str = Field(min_length=1, max_length=4096)
    """The file; a relative path counts from the manifest's directory."""

    prompt_field: str = Field(default="prompt", min_length=1, max_length=253)
    """Field of a line that holds the prompt."""

    answer_field: str = Field(default="answer", min_length=1, max_length=253)
    """Field of a line that holds the answer; a line may lack it where the reward function does without."""


TaskArgs = DigitsArgs | ReasoningGymArgs | JsonlArgs

ARGS_OF_TASK: dict[str, type[TaskArgs]] = {
    "digits": DigitsArgs,
    "reasoning-gym": ReasoningGymArgs,
    "jsonl": JsonlArgs,
}
