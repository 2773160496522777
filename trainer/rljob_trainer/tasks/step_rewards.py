"""The rewards of a step, and the reaction to failures of the reward function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rljob_trainer.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.scoring import RewardFailure, Scorer
from rljob_trainer.tasks.task import Task, shortened

OnRewardError = Literal["Fail", "Zero"]


@dataclass(frozen=True, slots=True)
class StepRewards:
    """The rewards of all completions of a step."""

    rewards: list[float]
    """In the order of the completions."""

    failures: int = 0
    """Number of calls of the reward function that failed, and count as 0."""

    first_failure: str | None = None
    """Message about the first of them, for people."""


def step_rewards(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    results: Sequence[float | RewardFailure | None],
    on_error: OnRewardError,
) -> StepRewards:
    """The rewards. `results`: of `Scoring.results`. Raises `BadInput` for a failure unless `on_error` is Zero."""
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


def try_out(task: Task, scorer: Scorer) -> None:
    """Format one prompt and score an empty response, so that errors show before anything is started.

    Raises `BadInput` if the reward function fails, whatever `task.onRewardError` is.
    """
    prompt = task.prompt(task.indices[0])
    empty = Completion(token_ids=[], logprobs=[], finished=True, text="")
    scoring = scorer.begin([prompt], 1)
    scoring.add(0, [empty])
    step_rewards(task, [prompt], [empty], scoring.results(stop_at_failure=True), "Fail")


def _failure_message(task: Task, prompt: Prompt, completion: Completion, failure: RewardFailure) -> str:
    return (
        f"the reward function {task.reward.name} {failure.message} for prompt {prompt.index} of the task {task.name} "
        f"and the response {shortened(completion.text)}"
    )


def _refusal(message: str, failure: RewardFailure) -> BadInput:
    """The error that ends the job. `message`: about `failure`."""
    advice = "correct the function, or write task.onRewardError: Zero to count such responses as 0"
    return BadInput(f"{message}; {advice}" + (f"\n{failure.traceback}" if failure.traceback else ""))
