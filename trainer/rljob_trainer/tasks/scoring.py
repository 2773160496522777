"""The reward of one response: a finite number, or the reason why there is none."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.user_code import is_stop, last_frames, raised, shown

_LARGEST = 1e38
"""Advantages are differences of rewards, and are float32, which ends at 3.4e38."""


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

    advice: str = ""
    """The value to return instead, if the function returned something that is no number: all its calls may fail."""


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
    """Call the function. Raises only the interrupt by which a signal stops this process."""
    try:
        return _reward_of(reward(record, completion))
    except BaseException as error:  # user code, and the classes of its values, may raise anything
        if is_stop(error):
            raise
        return RewardFailure(raised(error), last_frames(error))


def _reward_of(value: Any) -> float | RewardFailure:
    if not isinstance(value, numbers.Real | np.bool_):
        return RewardFailure(f"returned {shown(value)}, expected a finite number", advice=_advice(value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if abs(number) <= _LARGEST:
        return number
    return RewardFailure(f"returned {shown(value)}, expected a finite number between -1e38 and 1e38")


def _advice(value: Any) -> str:
    """The advice for a value that is no number."""
    if value is None:
        return "return a number on every path, since no response can be left out"
    if isinstance(value, dict):
        return "return one number, such as one of the values of this dict"
    if isinstance(value, list | tuple):
        return "return one number: the function is called for each response on its own"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "write return in place of yield"
    if callable(value):
        return "call it, and return its result"
    return "convert it with float()"


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
