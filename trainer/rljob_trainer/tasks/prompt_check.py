"""Checks the lengths of a task's prompts before anything is started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Prompt
from rljob_trainer.tasks.task import Task, shortened

_MOST_SECONDS = 20.0
"""Time limit of the check if no prompts are skipped. Later prompts are checked at their step. Ten thousand prompts take
a few seconds; a source that computes its items may be far slower."""

_MOST_ITEMS_TO_SKIP_FROM = 1_000_000
"""All prompts must be checked to skip some, in every attempt."""

_PROGRESS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class CheckedPrompts:
    """The result of a check."""

    task: Task
    """The task, without skipped prompts."""

    checked: int
    """Number of prompts that were checked."""

    skipped: int = 0
    """Number of prompts that were longer than the limit."""

    longest_tokens: int = 0
    """Tokens of the longest prompt that was checked."""


def check_prompts(
    task: Task,
    overlong: Literal["Fail", "Skip"],
    show: Callable[[str], None],
    *,
    may_skip: bool = True,
) -> CheckedPrompts:
    """Compare the prompts with `algorithm.maxPromptTokens`. `show`: displays the progress of a long check.

    `may_skip`: skipping may be advised; not if steps are committed, since it would change the order of the prompts.

    Raises `BadInput` for an empty prompt, and for prompts above the limit unless they are skipped.
    """
    total = len(task.items)
    if overlong == "Skip" and total > _MOST_ITEMS_TO_SKIP_FROM:
        raise BadInput(
            f"task.overlongPrompts: Skip supports at most {_MOST_ITEMS_TO_SKIP_FROM:,} prompts, found {total:,} in the "
            f"task {task.name}; write Fail, or remove the long prompts from the source"
        )
    deadline = None if overlong == "Skip" else time.monotonic() + _MOST_SECONDS
    kept: list[int] = []
    checked = 0
    longest: Prompt | None = None
    for prompt in _prompts(task, deadline, show):
        checked += 1
        if longest is None or len(prompt.token_ids) > len(longest.token_ids):
            longest = prompt
        if len(prompt.token_ids) <= task.max_prompt_tokens:
            kept.append(prompt.index)
    assert longest is not None, "a task has at least one item"
    too_long = checked - len(kept)
    if not too_long:
        return CheckedPrompts(task, checked, longest_tokens=len(longest.token_ids))
    if overlong == "Fail" or not kept:
        raise BadInput(_message(task, longest, too_long, checked, may_skip=may_skip and bool(kept)))
    return CheckedPrompts(replace(task, kept=kept), checked, too_long, len(longest.token_ids))


def _prompts(task: Task, deadline: float | None, show: Callable[[str], None]) -> Iterator[Prompt]:
    """The prompts in the order of the items, until `deadline`; at least one."""
    total = len(task.items)
    next_progress = time.monotonic() + _PROGRESS_SECONDS
    for index in range(total):
        yield task.prompt_of_any_length(index)
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return
        if now >= next_progress:
            show(f"checking the prompts: {index + 1:,} of {total:,}")
            next_progress = now + _PROGRESS_SECONDS


def _message(task: Task, longest: Prompt, too_long: int, checked: int, *, may_skip: bool) -> str:
    found = len(longest.token_ids)
    counted = "1 prompt is" if too_long == 1 else f"{too_long:,} prompts are"
    skip = ", or task.overlongPrompts: Skip" if may_skip else ""
    return (
        f"expected prompts of at most {task.max_prompt_tokens} tokens, found {found} in prompt {longest.index} of the "
        f"task {task.name} ({shortened(longest.text)}); {counted} longer, of {checked:,}. "
        f"Write algorithm.maxPromptTokens: {found}{skip}"
    )
