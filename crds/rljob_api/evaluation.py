"""Evaluation during training: its prompts, its times, its metrics, and its results in the status."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic_core import InitErrorDetails, PydanticCustomError

from rljob_api.api_model import ApiModel, Count, FreeForm, Rule
from rljob_api.task import TaskSpec

REWARD_MEAN = "reward_mean"
PASS_AT_1 = "pass@1"
_METRICS = "expected reward_mean, pass@1, or pass@ with the number of samplesPerPrompt"


def _has_one_source(evaluation: EvaluationSpec) -> bool:
    return (evaluation.task is not None) + (evaluation.args is not None) + (evaluation.held_out > 0) == 1


class EvaluationSpec(ApiModel):
    """Evaluation of the policy during training, with the weights between two steps. It changes neither the steps nor
    the trained weights, except that `heldOut` prompts are not trained on. One of `heldOut`, `args` and `task` names the
    prompts."""

    held_out: int = Field(default=0, ge=0, le=1_000_000)
    """Number of prompts of the training task that are evaluated instead of trained on. They follow from algorithm.seed.
    It cannot change after the job is created. 0: none."""

    args: FreeForm | None = None
    """Arguments that replace those of the training task, such as path: test.jsonl, or seed: 1 for reasoning-gym. All
    else is as in the training task."""

    task: TaskSpec | None = None
    """A task of its own. In pods, its files and Python modules are in task.files of the training task."""

    prompts: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Maximum number of prompts, the first of the task. Absent: all."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Steps between evaluations. Absent: only atStart and atEnd."""

    at_start: bool = True
    """Evaluate the initial model."""

    at_end: bool = True
    """Evaluate the model after the last step."""

    samples_per_prompt: int = Field(default=1, ge=1, le=1024)
    """Responses per prompt (k in avg@k and pass@k)."""

    temperature: float = Field(default=0.0, ge=0, le=10)
    """Sampling temperature. 0: the likeliest token (greedy decoding), which is for one response per prompt."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Tokens are sampled from the smallest set with this probability. 1: from all tokens."""

    max_response_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Maximum tokens of a response, at most algorithm.maxResponseTokens, which is the default."""

    success_reward: float = Field(default=1.0, ge=-1e15, le=1e15)
    """A response with at least this reward is a success, in avg@k and pass@k."""

    best_metric: str = Field(default=REWARD_MEAN, max_length=64)
    """Metric that decides which step is the best: reward_mean, pass@1, or pass@ with samplesPerPrompt."""

    keep_best: bool = False
    """If true, the model of the best step so far is kept in best/ of the output directory, in Hugging Face format."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(has(self.task) ? 1 : 0) + (has(self.args) ? 1 : 0) + (self.heldOut > 0 ? 1 : 0) == 1",
            holds=_has_one_source,
            field="heldOut",
            message="expected one source of prompts: write heldOut (prompts of the training task), args (arguments of "
            "the training task that differ) or task",
        ),
        Rule(
            cel="!has(self.task) || !has(self.task.files)",
            holds=lambda evaluation: evaluation.task is None or evaluation.task.files is None,
            field="task.files",
            message="must not be set, because pods mount only the files of the training task: remove it, and add the "
            "files to spec.task.files",
        ),
        Rule(
            cel="has(self.everySteps) || self.atStart || self.atEnd",
            holds=lambda evaluation: evaluation.every_steps is not None or evaluation.at_start or evaluation.at_end,
            field="everySteps",
            message="required without atStart and atEnd, since nothing would be evaluated: write everySteps: 10",
        ),
        Rule(
            cel="self.samplesPerPrompt == 1 || self.temperature > 0.0",
            holds=lambda evaluation: evaluation.samples_per_prompt == 1 or evaluation.temperature > 0,
            field="temperature",
            message="must be above 0 with several samplesPerPrompt, which would all be equal: write 1.0",
        ),
        Rule(
            cel="self.bestMetric.matches('^(reward_mean|pass@[1-9][0-9]{0,3})$')",
            holds=lambda evaluation: (
                re.fullmatch(r"reward_mean|pass@[1-9][0-9]{0,3}", evaluation.best_metric) is not None
            ),
            field="bestMetric",
            message=_METRICS,
        ),
    )

    def further_problems(self) -> list[InitErrorDetails]:
        """The number after pass@: the API server refuses a rule that compares it, as too expensive."""
        is_known = self.best_metric in (REWARD_MEAN, PASS_AT_1, f"pass@{self.samples_per_prompt}")
        if is_known or not self.rules[-1].holds(self):
            return []
        error = PydanticCustomError("conflict", "{message}", {"message": _METRICS})
        return [InitErrorDetails(type=error, loc=("bestMetric",), input=None)]

    def task_of(self, training: TaskSpec) -> TaskSpec:
        """The task with the prompts and rewards of the evaluation. With `heldOut`, it is the training task itself."""
        if self.task is not None:
            return self.task
        return training.model_copy(update={"args": training.args | (self.args or {})})

    def is_due(self, step: int, steps: int) -> bool:
        """True if the weights after `step` (0: the initial ones), of `steps`, are to be evaluated."""
        if step == 0:
            return self.at_start
        return (self.at_end and step == steps) or (self.every_steps is not None and step % self.every_steps == 0)


class EvaluationScore(ApiModel):
    """Result of one evaluation by `evaluation.bestMetric`."""

    step: Count
    """Last committed step before the evaluation. 0: the initial model."""

    metric: str = Field(max_length=64)
    """Name of the metric."""

    score: float
    """Value of the metric."""


class EvaluationStatus(ApiModel):
    """Results of the evaluations of the job."""

    last: EvaluationScore
    """Latest evaluation."""

    best: EvaluationScore
    """Evaluation with the highest score; of equal ones, the first."""
