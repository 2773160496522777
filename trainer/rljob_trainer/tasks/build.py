"""Builds the task that the manifest describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljob_api.task import TaskSpec
from rljob_trainer.tasks.built_in import TaskContext, task_module
from rljob_trainer.tasks.prompt_format import PromptFormat
from rljob_trainer.tasks.python_functions import call_for_items
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.task import ItemSource, Task


def build_task(
    spec: TaskSpec,
    tokenizer: Any,
    max_prompt_tokens: int,
    manifest_directory: Path,
    seed: int,
    vocabulary: int | None = None,
) -> Task:
    """The task that `spec` describes. Files and Python modules are relative to `manifest_directory`.

    `vocabulary`: see `PromptFormat`.

    Raises `BadInput` if the task is empty, or if its files, functions or arguments cannot be used.
    """
    return Task(
        name=spec.name,
        items=build_items(spec, tokenizer, manifest_directory, seed),
        rewards=RewardSource(spec, manifest_directory, seed).load(),
        prompt_format=PromptFormat(
            tokenizer,
            spec.prompt_template,
            spec.system_prompt,
            spec.chat_template,
            spec.chat_template_args,
            vocabulary,
        ),
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
    )


def build_items(spec: TaskSpec, tokenizer: Any, manifest_directory: Path, seed: int) -> ItemSource:
    """The items of the task. Only digits needs the tokenizer. Raises `BadInput`."""
    args = spec.typed_args()
    if args is None:
        return call_for_items(spec.name, spec.args, manifest_directory)
    items: ItemSource = task_module(spec.name).items(args, TaskContext(manifest_directory, seed, tokenizer))
    return items
