"""A task: items in a deterministic order, each with a prompt, and a reward for every response."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rljob_trainer.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.data_order import prompts_of_step
from rljob_trainer.tasks.prompt_format import PromptFormat


@dataclass(frozen=True, slots=True)
class Item:
    """One question, and the record that its responses are scored with."""

    question: str
    record: dict[str, Any]


class ItemSource(Protocol):
    """Where the items of a task come from: item i is the same whenever it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


class Reward(Protocol):
    """What a completion is worth. `name` is what people call it."""

    @property
    def name(self) -> str: ...

    def __call__(self, record: dict[str, Any], completion: Completion) -> Any: ...


@dataclass(frozen=True, slots=True)
class Task:
    """Everything the controller asks of a task. `max_prompt_tokens` bounds the prompts, special tokens included."""

    name: str
    items: ItemSource
    reward: Reward
    prompt_format: PromptFormat
    max_prompt_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.items) == 0:
            raise BadInput(f"expected at least one item in the task {self.name}, found none")

    def __len__(self) -> int:
        return len(self.items)

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """The prompts of `step`, counted from 1: the same in every attempt."""
        return [self.prompt(index) for index in prompts_of_step(step, count, len(self), self.seed)]

    def prompt(self, index: int) -> Prompt:
        """Raises `BadInput` where the prompt is empty or longer than the limit."""
        item = self.items[index]
        text, token_ids = self.prompt_format.tokens(item.question)
        if not token_ids:
            raise BadInput(f"expected text in prompt {index} of the task {self.name}, found none")
        if len(token_ids) > self.max_prompt_tokens:
            raise BadInput(
                f"prompt {index} of the task {self.name} has {len(token_ids)} tokens, more than the limit of "
                f"{self.max_prompt_tokens}: raise algorithm.maxPromptTokens or shorten the prompt ({_short(text)})"
            )
        return Prompt(index=index, token_ids=token_ids, text=text, item=item.record)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """The reward, finite. Raises `BadInput` where the reward function raises or returns something else."""
        where = f"prompt {prompt.index} of the task {self.name} and the response {_short(completion.text)}"
        try:
            value = self.reward(prompt.item, completion)
        except Exception as error:  # whatever the user's function does
            raise BadInput(
                f"the reward function {self.reward.name} raised {type(error).__name__}: {error} for {where}"
            ) from error
        if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
            raise BadInput(
                f"expected a finite number from the reward function {self.reward.name}, found {value!r} for {where}"
            )
        return float(value)


def try_out(task: Task) -> None:
    """Make one prompt and score an empty response to it, so that what cannot work fails before anything is started."""
    task.score(task.prompt(0), Completion(token_ids=[], logprobs=[], finished=True, text=""))


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:120]}…")
