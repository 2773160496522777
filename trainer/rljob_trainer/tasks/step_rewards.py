"""The rewards of a step, and the reaction to failures of the reward function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.rewards import response_with
from rljob_trainer.tasks.scoring import RewardFailure, Scorer
from rljob_trainer.tasks.task import Task, shortened
from rljob_trainer.tasks.user_code import short_repr

OnRewardError = Literal["Fail", "Zero"]

_MOST_TRIED = 4
"""Prompts that are tried before the start."""


@dataclass(frozen=True, slots=True)
class StepRewards:
    """The rewards of all completions of a step."""

    rewards: list[float]
    """Rewards in the order of the completions."""

    failures: int = 0
    """Number of calls of the reward function that failed, and count as 0."""

    first_failure: str | None = None
    """Message about the first of them."""


def step_rewards(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    results: Sequence[float | RewardFailure | None],
    on_error: OnRewardError,
) -> StepRewards:
    """The rewards. `results`: those of `Scoring.results`. Raises `BadInput` for a failure unless `on_error` is Zero."""
    group_size = len(completions) // len(prompts)
    failures = {index: result for index, result in enumerate(results) if isinstance(result, RewardFailure)}
    rewards = [result if isinstance(result, float) else 0.0 for result in results]
    if not failures:
        return StepRewards(rewards)
    first, failure = next(iter(failures.items()))
    message = _failure_message(task, prompts[first // group_size], completions[first], failure)
    if on_error == "Fail":
        raise _refusal(message, failure)
    return StepRewards(rewards, len(failures), message)


def try_out(task: Task, scorer: Scorer, spec: TaskSpec) -> list[str]:
    """Score an empty response, and the answer of the record if it has one, before anything is started.

    Returns warnings: failures that count as 0, and a reward that the answer does not raise. Such prompts are no proof:
    up to four are tried. Raises `BadInput` if the function fails, with task.onRewardError: Zero if it always fails.
    """
    failures: list[tuple[str, RewardFailure]] = []
    tried, unrewarded = 0, []
    for index in task.indices[:_MOST_TRIED]:
        prompt = task.prompt(index)
        answer = _answer(prompt) if spec.reward else None
        right = None if answer is None else response_with(str(answer), spec.answer)
        completions = [_response(text) for text in ("", right) if text is not None]
        scoring = scorer.begin([prompt], len(completions))
        scoring.add(0, completions)
        results = scoring.results(stop_at_failure=False)
        failed = [
            (_failure_message(task, prompt, completion, result), result)
            for completion, result in zip(completions, results, strict=True)
            if isinstance(result, RewardFailure)
        ]
        if failed and spec.on_reward_error == "Fail" and (isinstance(answer, str) or results[0] is failed[0][1]):
            raise _refusal(*failed[0])
        failures += failed
        tried += len(completions)
        rewards = [result for result in results if isinstance(result, float)]
        if len(rewards) == 2 and rewards[1] <= rewards[0]:
            unrewarded.append((prompt.index, answer, rewards[1]))
        elif rewards and not failed:
            unrewarded = []
            break
    if len(failures) == tried and failures:
        message, failure = failures[0]
        found = f"expected a reward for one of the {tried} responses tried, found none: {message}"
        raise BadInput(_with_traceback(f"{found}; {failure.advice or 'correct the function'}", failure))
    effect = "count as 0" if spec.on_reward_error == "Zero" else "end the job (task.onRewardError: Fail)"
    warnings = [f"{message}; such responses {effect}" for message, _ in failures[:1]]
    warnings += [_unrewarded_message(task, *found) for found in unrewarded[:1]]
    return warnings + (_mixed_answers(task) if spec.reward else [])


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


def _unrewarded_message(task: Task, index: int, answer: Any, reward: float) -> str:
    advice = "check the function and task.answer, since the policy learns nothing if no response is rewarded"
    if not isinstance(answer, str):
        found = short_repr(answer)
        advice = f'the answer is not text ({found}), the function receives text: compare with str(record["answer"])'
    return (
        f"the reward function {task.reward.name} returned {reward:g} for the answer of prompt {index} of the task "
        f"{task.name}, no more than for an empty response; {advice}"
    )


def _failure_message(task: Task, prompt: Prompt, completion: Completion, failure: RewardFailure) -> str:
    return (
        f"the reward function {task.reward.name} {failure.message} for prompt {prompt.index} of the task {task.name} "
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
