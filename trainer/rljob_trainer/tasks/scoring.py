"""The rewards of responses: finite numbers, or the reason why there is none."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.rewards import Response, Reward
from rljob_trainer.tasks.user_code import call, error_text, is_stop, last_frames, short_repr

_LARGEST = 1e38
"""Advantages are differences of rewards, and are float32, which ends at 3.4e38."""


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
"""NaN: the function leaves the response out."""

Results = list[list[Result | None]]
"""For each reward function, the result of each completion; None: it is missing."""


class Scoring:
    """The rewards of the completions of one step, while they are computed."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        rewards: Sequence[Reward],
        submit: Callable[[int, list[Response]], Future[list[Result]]],
    ) -> None:
        """`submit`: begins a call of the reward function with this place in `rewards`."""
        self._prompts, self._group_size, self._rewards, self._submit = prompts, group_size, rewards, submit
        self._calls: list[dict[int, tuple[Future[list[Result]], int]]] = [{} for _ in rewards]
        """For each function, the call of each completion, and its place in the call."""

    def add(self, first: int, completions: Sequence[Completion]) -> None:
        """Begin to score completions of the step, whole groups; the first of them has the index `first`."""
        size = self._group_size
        responses = [
            Response.of(self._prompts[index // size], completion) for index, completion in enumerate(completions, first)
        ]
        for place, reward in enumerate(self._rewards):
            step = size if reward.batch else 1
            for start in range(0, len(responses), step):
                chosen = responses[start : start + step]
                submitted = self._submit(place, chosen)
                self._calls[place] |= {first + start + member: (submitted, member) for member in range(len(chosen))}

    def results(self, *, stop_at_failure: bool) -> Results:
        """Wait for the results of all completions that were added, in the order of the indices; the others are None.

        `stop_at_failure`: return at the first failure; results that are missing then are None, too.
        """
        for done in as_completed({submitted for calls in self._calls for submitted, _ in calls.values()}):
            if stop_at_failure and any(isinstance(result, RewardFailure) for result in done.result()):
                break
        return self._results(range(len(self._prompts) * self._group_size))

    def known(self, indices: Sequence[int]) -> KnownRewards | None:
        """The results of these completions, without waiting; None if one is missing."""
        results = self._results(indices)
        return None if any(None in of_function for of_function in results) else KnownRewards(results)

    def _results(self, indices: Sequence[int]) -> Results:
        return [[_result(calls.get(index)) for index in indices] for calls in self._calls]


def _result(submitted: tuple[Future[list[Result]], int] | None) -> Result | None:
    return submitted[0].result()[submitted[1]] if submitted is not None and submitted[0].done() else None


@dataclass(frozen=True, slots=True)
class JoinedRewards:
    """The rewards of several rounds of generation, round after round."""

    rounds: Sequence[PendingRewards]

    def results(self, *, stop_at_failure: bool) -> Results:
        """Results as of `Scoring.results`."""
        of_rounds = [each.results(stop_at_failure=stop_at_failure) for each in self.rounds]
        return [list(chain.from_iterable(of_function)) for of_function in zip(*of_rounds, strict=True)]


@dataclass(frozen=True, slots=True)
class ChosenRewards:
    """The rewards of some completions, in another order."""

    of_all: Scoring | JoinedRewards

    indices: Sequence[int]
    """Index in `of_all` of each completion."""

    def results(self, *, stop_at_failure: bool) -> Results:
        """Results as of `Scoring.results`."""
        found = self.of_all.results(stop_at_failure=stop_at_failure)
        return [[of_function[index] for index in self.indices] for of_function in found]


@dataclass(frozen=True, slots=True)
class KnownRewards:
    """The rewards of some completions."""

    found: Results

    def results(self, *, stop_at_failure: bool) -> Results:
        """The results."""
        return self.found


PendingRewards = Scoring | JoinedRewards | ChosenRewards | KnownRewards


class Scorer(Protocol):
    """Scores the completions of steps."""

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        """Begin a step, or begin it again: calls for an earlier `Scoring` that have not begun are dropped."""


@dataclass(frozen=True, slots=True)
class ScoringHere:
    """Scores in this process, without a time limit. For rewards of the built-in tasks that cannot hang."""

    rewards: Sequence[Reward]

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        return Scoring(prompts, group_size, self.rewards, self._computed)

    def _computed(self, place: int, responses: list[Response]) -> Future[list[Result]]:
        computed: Future[list[Result]] = Future()
        computed.set_result(compute_rewards(self.rewards[place], [responses])[0])
        return computed


def compute_rewards(
    reward: Reward, calls: Sequence[list[Response]], timeout_seconds: float | None = None
) -> list[list[Result]]:
    """Results of calls of the function, for the responses of each; those of an async function run concurrently, for at
    most `timeout_seconds` each. Raises only the interrupt by which a signal stops this process."""
    if reward.is_async:
        return call(_all_awaited, reward, calls, timeout_seconds)  # type: ignore[no-any-return]
    return [_computed(reward, responses) for responses in calls]


def _computed(reward: Reward, responses: list[Response]) -> list[Result]:
    try:
        return _results_of(call(reward, responses), len(responses), reward.batch)
    except BaseException as error:  # user code, and the classes of its values, may raise anything
        return [_failure(error)] * len(responses)


async def _all_awaited(
    reward: Reward, calls: Sequence[list[Response]], timeout_seconds: float | None
) -> list[list[Result]]:
    slots = asyncio.Semaphore(reward.concurrency)
    return await asyncio.gather(*(_awaited(reward, responses, slots, timeout_seconds) for responses in calls))


async def _awaited(
    reward: Reward, responses: list[Response], slots: asyncio.Semaphore, timeout_seconds: float | None
) -> list[Result]:
    async with slots:
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                value = await reward(responses)
            return _results_of(value, len(responses), reward.batch)
        except BaseException as error:
            late = timeout_seconds is not None and limit.expired()
            return [timed_out(timeout_seconds or 0) if late else _failure(error)] * len(responses)


def _failure(error: BaseException) -> RewardFailure:
    if is_stop(error):
        raise error
    if isinstance(error, BadInput):  # of a built-in function
        return RewardFailure(str(error))
    return RewardFailure(error_text(error), last_frames(error))


def timed_out(timeout_seconds: float) -> RewardFailure:
    """The failure of a call that exceeds the limit."""
    return RewardFailure(f"took more than {timeout_seconds:g} s (task.rewardTimeoutSeconds)")


def _results_of(value: Any, count: int, batch: bool) -> list[Result]:
    """The results in the value of a call for `count` responses."""
    if not batch:
        return [_result_of(value)]
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
        return [RewardFailure(f"returned {short_repr(value)}, expected a list of {count} numbers")] * count
    if len(value) != count:
        return [RewardFailure(f"returned {len(value)} rewards, expected {count}, one for each response")] * count
    return [_result_of(each) for each in value]


def _result_of(value: Any) -> Result:
    if value is None:
        return math.nan
    if isinstance(value, dict) and "score" in value:  # as in verl
        value = value["score"]
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
    if isinstance(value, dict):
        return "return one number, such as one of the values of this dict"
    if isinstance(value, list | tuple):
        return "return one number: without `batch: true`, the function is called for each response on its own"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "write return in place of yield"
    if callable(value):
        return "call it, and return its result"
    return "convert it with float()"
