"""Builds the task that the manifest describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljob_api.task import TaskSpec
from rljob_api.task_args import JsonlArgs, ReasoningGymArgs
from rljob_trainer.errors import BadInput
from rljob_trainer.tasks.digits import Digits, ShareOfDigit
from rljob_trainer.tasks.jsonl import read_items
from rljob_trainer.tasks.python_functions import call_for_items
from rljob_trainer.tasks.reasoning_gym import ReasoningGymItems, verifier
from rljob_trainer.tasks.rewards import reward_from_manifest
from rljob_trainer.tasks.task import ItemSource, PromptFormat, Reward, Task


def build_task(spec: TaskSpec, tokenizer: Any, max_prompt_tokens: int, manifest_directory: Path, seed: int) -> Task:
    """The task that `spec` describes. Files and Python modules are relative to `manifest_directory`.

    Raises `BadInput` if the task is empty, or if its files, functions or arguments cannot be used.
    """
    items, own_reward = _items_and_own_reward(spec, tokenizer, manifest_directory, seed)
    reward = reward_from_manifest(spec.reward, spec.answer, manifest_directory) if spec.reward else own_reward
    if reward is None:
        raise BadInput(
            f"task.reward: expected a reward function for the task {spec.name}, found none; write module:function"
        )
    return Task(
        name=spec.name,
        items=items,
        reward=reward,
        prompt_format=PromptFormat(tokenizer, spec.prompt_template, spec.system_prompt, spec.chat_template),
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
    )


def _items_and_own_reward(
    spec: TaskSpec, tokenizer: Any, manifest_directory: Path, seed: int
) -> tuple[ItemSource, Reward | None]:
    args = spec.typed_args()
    if spec.name == "digits":
        return Digits(tokenizer), ShareOfDigit()
    if isinstance(args, ReasoningGymArgs):
        items = ReasoningGymItems(args, seed)
        return items, verifier(items, spec.answer)
    if isinstance(args, JsonlArgs):
        return read_items(args, manifest_directory), None
    return call_for_items(spec.name, spec.args, manifest_directory), None
