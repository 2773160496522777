"""The reward of one response: a finite number, or the reason why there is none."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rljob_trainer.rollout_batch import Completion, Prompt

_LAST_FRAMES = 5


class Reward(Protocol):
    """A reward function."""

    @property
    def name(self) -> str:
        """For messages."""

    def __call__(self, record: dict[str, Any], completion: Completion) -> Any: ...


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A call of the reward function that gave no finite number."""

    message: str
    """Completes the sentence "the reward function NAME …"."""

    traceback: str = ""
    """The last frames, if the function raised."""


class PendingRewards(Protocol):
    """The rewards of one step, while they are computed."""

    def results(self, *, stop_at_failure: bool) -> list[float | RewardFailure | None]:
        """Wait for the results of all completions that were added, in the order of the indices; the others are None.

        `stop_at_failure`: return at the first failure; results that are missing then are None, too.
        """


class Scoring(PendingRewards, Protocol):
    """Computes the rewards of one step."""

    def add(self, first: int, completions: Sequence[Completion]) -> None:
        """Begin to score completions of the step; the first of them has the index `first`."""


@dataclass(frozen=True, slots=True)
class ChosenRewards:
    """The rewards of those completions of a step that were added, in another order."""

    of_all: PendingRewards

    indices: Sequence[int]
    """Of the completions, in their order here."""

    def results(self, *, stop_at_failure: bool) -> list[float | RewardFailure | None]:
        found = self.of_all.results(stop_at_failure=stop_at_failure)
        return [found[index] for index in self.indices]


class Scorer(Protocol):
    """Scores the completions of steps."""

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        """Begin a step, or begin it again: results of an earlier `Scoring` are dropped."""


def compute_reward(reward: Reward, record: dict[str, Any], completion: Completion) -> float | RewardFailure:
    """Call the function. Never raises an `Exception`."""
    try:
        value = reward(record, completion)
    except Exception as error:  # user code may raise anything
        return RewardFailure(f"raised {type(error).__name__}: {error}", _traceback(error))
    if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
        return RewardFailure(f"returned {value!r:.200}, expected a finite number")
    return float(value)


def _traceback(error: Exception) -> str:
    """The last frames of the function, without those of this package that called it."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    last = traceback.format_list((foreign or frames)[-_LAST_FRAMES:])
    return "".join(["Traceback (most recent call last):\n", *last, *traceback.format_exception_only(error)]).rstrip()


class ScoringHere:
    """Scores in this process, without a time limit. For rewards of the built-in tasks that cannot hang."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        return _StepHere(self._reward, prompts, group_size)


class _StepHere:
    def __init__(self, reward: Reward, prompts: Sequence[Prompt], group_size: int) -> None:
        self._reward, self._prompts, self._group_size = reward, prompts, group_size
        self._results: list[float | RewardFailure | None] = [None] * (len(prompts) * group_size)

    def add(self, first: int, completions: Sequence[Completion]) -> None:
        for index, completion in enumerate(completions, first):
            record = self._prompts[index // self._group_size].item
            self._results[index] = compute_reward(self._reward, record, completion)

    def results(self, *, stop_at_failure: bool) -> list[float | RewardFailure | None]:
        return list(self._results)
