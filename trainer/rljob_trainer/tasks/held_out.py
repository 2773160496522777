"""Prompts of a task that are evaluated instead of trained on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rljob_client.errors import BadInput
from rljob_trainer.tasks.task import Task, prompts_of_step


def held_out(task: Task, count: int) -> tuple[Task, Task]:
    """The task without `count` of its prompts, and the task of these alone. They follow from the task's seed.

    Raises `BadInput` unless prompts remain to train on.
    """
    indices = task.indices
    if count >= len(indices):
        raise BadInput(
            f"expected evaluation.heldOut to be less than {len(indices):,}, the number of prompts of the task "
            f"{task.name}, found {count:,}; lower it"
        ).at("spec", "evaluation", "heldOut")
    places = sorted(prompts_of_step(1, count, len(indices), task.seed))
    return replace(task, kept=Without(indices, places)), replace(task, kept=[indices[place] for place in places])


@dataclass(frozen=True, slots=True)
class Without(Sequence[int]):
    """A sequence without some of its places. A source that computes its items may have 2³¹ of them: none are copied."""

    whole: Sequence[int]

    left_out: Sequence[int]
    """Places that are left out, in ascending order."""

    def __len__(self) -> int:
        return len(self.whole) - len(self.left_out)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        # Before the n-th place that is left out, left_out[n] - n others are kept.
        before = bisect_right(range(len(self.left_out)), place, key=lambda n: self.left_out[n] - n)
        return self.whole[place + before]
