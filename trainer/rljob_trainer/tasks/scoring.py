"""The reward of one response: a finite number, or the reason why there is none."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.user_code import error_text, is_stop, last_frames, short_repr

_LARGEST = 1e38
"""Advantages are differences of rewards, and are float32, which ends at 3.4e38."""


class Reward(Protocol):
    """A reward function."""

    @property
    def name(self) -> str:
        """Name in messages."""

    def __call__(self, record: dict[str, Any], completion: Completion) -> Any: ...


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A call of the reward function that gave no finite number."""

    message: str
    """Predicate of the message "the reward function NAME …"."""

    traceback: str = ""
    """The last frames, if the function raised."""

    advice: str = ""
    """The value to return instead, if the function returned something other than a number: all its calls may fail."""


Result = float | RewardFailure


class Scoring:
    """The rewards of the completions of one step, while they are computed."""

    def __init__(
        self, prompts: Sequence[Prompt], group_size: int, submit: Callable[[dict[str, Any], Completion], Future[Result]]
    ) -> None:
        """`submit`: begins to compute the reward of a completion, with the record of its prompt."""
        self._prompts, self._group_size, self._submit = prompts, group_size, submit
        self._calls: dict[int, Future[Result]] = {}

    def add(self, first: int, completions: Sequence[Completion]) -> None:
        """Begin to score completions of the step; the first of them has the index `first`."""
        for index, completion in enumerate(completions, first):
            self._calls[index] = self._submit(self._prompts[index // self._group_size].item, completion)

    def results(self, *, stop_at_failure: bool) -> list[Result | None]:
        """Wait for the results of all completions that were added, in the order of the indices; the others are None.

        `stop_at_failure`: return at the first failure; results that are missing then are None, too.
        """
        for call in as_completed(self._calls.values()):
            if isinstance(call.result(), RewardFailure) and stop_at_failure:
                break
        calls = map(self._calls.get, range(len(self._prompts) * self._group_size))
        return [call.result() if call is not None and call.done() else None for call in calls]


@dataclass(frozen=True, slots=True)
class JoinedRewards:
    """The rewards of several rounds of generation, round after round."""

    rounds: Sequence[PendingRewards]

    def results(self, *, stop_at_failure: bool) -> list[Result | None]:
        """Results as of `Scoring.results`."""
        return [result for each in self.rounds for result in each.results(stop_at_failure=stop_at_failure)]


@dataclass(frozen=True, slots=True)
class ChosenRewards:
    """The rewards of some completions, in another order."""

    of_all: Scoring | JoinedRewards

    indices: Sequence[int]
    """Index in `of_all` of each completion."""

    def results(self, *, stop_at_failure: bool) -> list[Result | None]:
        """Results as of `Scoring.results`."""
        found = self.of_all.results(stop_at_failure=stop_at_failure)
        return [found[index] for index in self.indices]


PendingRewards = Scoring | ChosenRewards


class Scorer(Protocol):
    """Scores the completions of steps."""

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        """Begin a step, or begin it again: calls for an earlier `Scoring` that have not begun are dropped."""


@dataclass(frozen=True, slots=True)
class ScoringHere:
    """Scores in this process, without a time limit. For rewards of the built-in tasks that cannot hang."""

    reward: Reward

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        return Scoring(prompts, group_size, self._computed)

    def _computed(self, record: dict[str, Any], completion: Completion) -> Future[Result]:
        computed: Future[Result] = Future()
        computed.set_result(compute_reward(self.reward, record, completion))
        return computed


def compute_reward(reward: Reward, record: dict[str, Any], completion: Completion) -> Result:
    """Call the function. Raises only the interrupt by which a signal stops this process."""
    try:
        return _reward_of(reward(record, completion))
    except BaseException as error:  # user code, and the classes of its values, may raise anything
        if is_stop(error):
            raise
        return RewardFailure(error_text(error), last_frames(error))


def _reward_of(value: Any) -> Result:
    if not isinstance(value, numbers.Real | np.bool_):
        return RewardFailure(f"returned {short_repr(value)}, expected a finite number", advice=_advice(value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if abs(number) <= _LARGEST:
        return number
    return RewardFailure(f"returned {short_repr(value)}, expected a finite number between -1e38 and 1e38")


def _advice(value: Any) -> str:
    """The advice for a value that is not a number."""
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
