"""The rewards of a step, and the reaction to failures of the reward function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.rewards import Reward, response_with
from rljob_trainer.tasks.scoring import Result, Results, RewardFailure, Scorer
from rljob_trainer.tasks.task import Task, shortened
from rljob_trainer.tasks.user_code import short_repr

OnRewardError = Literal["Fail", "Zero"]

_MOST_TRIED = 4
"""Prompts that are tried before the start."""


@dataclass(frozen=True, slots=True)
class StepRewards:
    """The rewards of all completions of a step, in their order."""

    rewards: list[float]
    """Weighted sums of the parts that are not NaN; 0 without any."""

    parts: dict[str, list[float]]
    """The unweighted rewards of each function, by its name; NaN: left out. Empty if there is one function."""

    kept: list[bool]
    """False for completions that every function left out. Empty: there are none."""

    failures: int = 0
    """Number of completions for which a reward function failed, and counts as 0."""

    first_failure: str | None = None
    """Message about the first of them."""


def step_rewards(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    results: Results,
    on_error: OnRewardError,
) -> StepRewards:
    """The rewards. `results`: those of `Scoring.results`. Raises `BadInput` for a failure unless `on_error` is Zero."""
    group_size = len(completions) // len(prompts)
    failed: dict[int, tuple[str, RewardFailure]] = {}
    for reward, of_function in zip(task.rewards, results, strict=True):
        for index, result in enumerate(of_function):
            if isinstance(result, RewardFailure) and index not in failed:
                prompt = prompts[index // group_size]
                failed[index] = (_failure_message(task, reward, prompt, completions[index], result), result)
    first = failed[min(failed)] if failed else None
    if first is not None and on_error == "Fail":
        raise _refusal(*first)
    parts = [[result if isinstance(result, float) else 0.0 for result in of_function] for of_function in results]
    each = list(zip(*parts, strict=True))
    kept = [not all(map(math.isnan, values)) for values in each]
    return StepRewards(
        [_weighted_sum(task.rewards, values) for values in each],
        {reward.label: part for reward, part in zip(task.rewards, parts, strict=True)} if len(parts) > 1 else {},
        [] if all(kept) else kept,
        len(failed),
        first[0] if first else None,
    )


def _weighted_sum(rewards: Sequence[Reward], values: Sequence[float]) -> float:
    return sum((r.weight * value for r, value in zip(rewards, values, strict=True) if not math.isnan(value)), 0.0)


def try_out(task: Task, scorer: Scorer, spec: TaskSpec) -> list[str]:
    """Score an empty response, and the answer of the record if it has one, before anything is started.

    Returns warnings: failures that count as 0, and a reward that the answer does not raise. Such prompts are no proof:
    up to four are tried. Raises `BadInput` if a function fails, with task.onRewardError: Zero if one always fails, and
    if all responses are left out.
    """
    failures: list[tuple[str, RewardFailure]] = []
    failing = [0] * len(task.rewards)
    tried, unrewarded, scored = 0, [], False
    comparing = [place for place, reward in enumerate(task.rewards) if reward.built_in.compares]
    for index in task.indices[:_MOST_TRIED]:
        prompt = task.prompt(index)
        answer = _answer(prompt) if comparing else None
        right = None if answer is None else response_with(str(answer), spec.answer)
        completions = [_response(text) for text in ("", right) if text is not None]
        scoring = scorer.begin([prompt], len(completions))
        scoring.add(0, completions)
        results = scoring.results(stop_at_failure=False)
        failed = [
            (_failure_message(task, reward, prompt, completion, result), result)
            for reward, of_function in zip(task.rewards, results, strict=True)
            for completion, result in zip(completions, of_function, strict=True)
            if isinstance(result, RewardFailure)
        ]
        fails_for_empty = any(isinstance(of_function[0], RewardFailure) for of_function in results)
        if failed and spec.on_reward_error == "Fail" and (isinstance(answer, str) or fails_for_empty):
            raise _refusal(*failed[0])
        failures += failed
        failing = [
            count + sum(isinstance(result, RewardFailure) for result in of_function)
            for count, of_function in zip(failing, results, strict=True)
        ]
        tried += len(completions)
        scored = scored or any(isinstance(each, float) and not math.isnan(each) for part in results for each in part)
        if right is not None and not any(_is_raised(task.rewards[place], *results[place]) for place in comparing):
            place = comparing[0]
            unrewarded.append(_unrewarded_message(task, place, prompt.index, answer, results[place][1]))
        elif scored and not failed:
            unrewarded = []
            break
    if failures and tried in failing:
        message, failure = failures[0]
        found = f"expected a reward for one of the {tried} responses tried, found none: {message}"
        raise BadInput(_with_traceback(f"{found}; {failure.advice or 'correct the function'}", failure))
    if not scored:
        names = ", ".join(reward.name for reward in task.rewards)
        raise BadInput(
            f"expected a reward for one of the {tried} responses tried, found that {names} left all of them out "
            "(None); return a number, and check the fields of the records that the functions read"
        )
    effect = "count as 0" if spec.on_reward_error == "Zero" else "end the job (task.onRewardError: Fail)"
    warnings = [f"{message}; such responses {effect}" for message, _ in failures[:1]]
    warnings += unrewarded[:1]
    return warnings + (_mixed_answers(task) if comparing else [])


def _is_raised(reward: Reward, empty: Result | None, right: Result | None) -> bool:
    """True if the weighted reward of the right answer is above that of an empty response, or is not known."""
    if not isinstance(empty, float) or not isinstance(right, float):
        return True
    return not reward.weight * right <= reward.weight * empty  # NaN: left out


def _answer(prompt: Prompt) -> Any:
    """The answer in the record, the first of several; None if it has none that a response could be."""
    answer = prompt.item.get("answer")
    if isinstance(answer, list) and answer:
        answer = answer[0]
    return None if isinstance(answer, list | dict) else answer


def _mixed_answers(task: Task) -> list[str]:
    """A warning if some records have an answer and others none, or one of another type. For data in memory."""
    if not isinstance(task.items, list):
        return []
    found: dict[str, list[int]] = {}
    for index, item in enumerate(task.items):
        found.setdefault(_kind(item.record.get("answer")), []).append(index)
    if len(found) < 2:
        return []
    kinds = ", ".join(f"{kind} in {len(indices):,} (first: {indices[0]})" for kind, indices in found.items())
    return [f"the prompts of the task {task.name} have answers of several kinds: {kinds}; the reward may need one kind"]


def _kind(answer: Any) -> str:
    if answer is None:
        return "none"
    return "text" if isinstance(answer, str) else "number" if isinstance(answer, int | float) else type(answer).__name__


def _response(text: str) -> Completion:
    return Completion(token_ids=[], logprobs=[], finished=True, text=text)


def _unrewarded_message(task: Task, place: int, index: int, answer: Any, reward: Any) -> str:
    advice = "check the function and task.answer, since the policy learns nothing if no response is rewarded"
    if not isinstance(answer, str):
        found = short_repr(answer)
        advice = f'the answer is not text ({found}), the function receives text: compare with str(record["answer"])'
    return (
        f"the reward function {task.rewards[place].name} returned {reward:g} for the answer of prompt {index} of the "
        f"task {task.name}, no more than for an empty response; {advice}"
    )


def _failure_message(task: Task, reward: Reward, prompt: Prompt, completion: Completion, failure: RewardFailure) -> str:
    return (
        f"the reward function {reward.name} {failure.message} for prompt {prompt.index} of the task {task.name} "
        f"and the response {shortened(completion.text)}"
    )


def _refusal(message: str, failure: RewardFailure) -> BadInput:
    """The error that ends the job. `message`: about `failure`."""
    advice = failure.advice or (
        "correct the function, which must accept every response, even an empty one, "
        "or write task.onRewardError: Zero to count such responses as 0"
    )
    return BadInput(_with_traceback(f"{message}; {advice}", failure))


def _with_traceback(message: str, failure: RewardFailure) -> str:
    return f"{message}\n{failure.traceback}" if failure.traceback else message
