"""Findings about committed steps that trained on nothing, or lost a part of their work. Pure: counted in the ledger, so
that they hold across attempts. Checks of an update: engine and policy compute the same probabilities in the first step,
and a replayed step applies the same updates as before.

Every comparison is written so that NaN fails it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rljob_api.step_report import MAX_WARNING_LENGTH, TrainingWarning, TrainingWarningReason
from rljob_client.errors import BadInput
from rljob_client.run_directory.records import StepRecord
from rljob_trainer.policy.config import UpdateResult

_MAX_STEPS_NOT_FINITE = 3
"""Weights that are NaN stay so. A single overflow of a gradient does not repeat."""

_FIRST_STEPS = 5


@dataclass(frozen=True, slots=True)
class StepProblem:
    """A problem of the last committed step."""

    reason: TrainingWarningReason

    steps: int
    """Steps of the run with this problem, the last one included."""

    message: str

    @property
    def is_due(self) -> bool:
        """True for the first such step, the second, the fourth, and so on: a warning in each would hide the others."""
        return is_power_of_two(self.steps)

    def warning(self) -> TrainingWarning:
        return TrainingWarning(reason=self.reason, message=self.message[:MAX_WARNING_LENGTH])


def is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


def findings(steps: Sequence[StepRecord], *, responses_may_end: bool) -> list[StepProblem]:
    """The problems of the last of the committed `steps`, the gravest first.

    `responses_may_end`: False if `algorithm.ignoreEndOfSequence` is set, so that every response has full length.
    """
    if not steps:
        return []
    last, found = steps[-1], []
    for kind in _KINDS:
        if not kind.applies(last) or (kind.reason == "ResponsesTruncated" and not responses_may_end):
            continue
        if kind.reason == "RewardsEqual" and _has_learned(steps):
            continue  # the task is solved
        count = sum(kind.applies(step) for step in steps)
        so_far = f" ({count} of {len(steps)} steps so far)" if count > 1 else ""
        message = f"step {last.step}: {kind.describe(last)}{so_far}; {kind.advice}"
        found.append(StepProblem(kind.reason, count, message))
    return found


def require_learning(steps: Sequence[StepRecord], max_steps_without_learning: int, total_steps: int) -> None:
    """Raise `BadInput` if the last of the committed `steps` trained on nothing, too often in a row.

    `max_steps_without_learning`: see `RecoverySpec`. `total_steps`: number in the job, which may be fewer than the
    limit for numbers that are not finite.
    """
    not_finite = _trailing(steps, _trained_on_no_number)
    if len(not_finite) >= min(_MAX_STEPS_NOT_FINITE, total_steps):
        raise BadInput(
            f"expected finite numbers in an update, found {_in_a_row(not_finite)} that learned nothing: "
            f"{_describe_numbers(not_finite[-1])}. {_NOT_FINITE_ADVICE}"
        )
    uniform = _trailing(steps, lambda step: step.has_no_signal)
    if not max_steps_without_learning or len(uniform) < max_steps_without_learning or _has_learned(steps):
        return
    raise BadInput(
        f"expected rewards that differ between the responses to a prompt, found {_in_a_row(uniform)} in which the "
        f"responses to each prompt had equal rewards (mean reward {uniform[-1].reward.mean:.4g}): the policy learns "
        "nothing from them. Correct the reward function (checkpoint.acceptChangedInputs: true resumes with it), start "
        "over with an easier task or more responses per prompt (algorithm.groupSize), or write a larger "
        "recovery.maxStepsWithoutLearning, or 0 for no limit"
    )


def _trained_on_no_number(step: StepRecord) -> bool:
    """No update was applied, or every token was dropped, because the numbers were not finite."""
    return _skipped_every_update(step) or _dropped_every_token(step)


def _has_learned(steps: Sequence[StepRecord]) -> bool:
    """The reward is higher than in the first steps: a task that is solved leaves nothing to learn, either."""
    return steps[-1].reward.mean > max(step.reward.mean for step in steps[:_FIRST_STEPS])


def _trailing(steps: Sequence[StepRecord], applies: Callable[[StepRecord], bool]) -> list[StepRecord]:
    return list(takewhile(applies, reversed(steps)))[::-1]


def _in_a_row(steps: Sequence[StepRecord]) -> str:
    if len(steps) == 1:
        return f"step {steps[0].step}"
    return f"{len(steps)} steps in a row ({steps[0].step} to {steps[-1].step})"


def _metric(step: StepRecord, name: str) -> float:
    return step.metrics.get(name, 0.0)


def _skipped_every_update(step: StepRecord) -> bool:
    return not math.isfinite(_metric(step, "grad_norm"))


def _dropped_every_token(step: StepRecord) -> bool:
    dropped = _metric(step, "dropped_tokens")
    return dropped > 0 and not dropped < _metric(step, "tokens")


def _lost_numbers(step: StepRecord) -> bool:
    lost = _metric(step, "skipped_updates") > 0 or _metric(step, "dropped_tokens") > 0
    return lost or not all(map(math.isfinite, step.metrics.values()))


def _describe_numbers(step: StepRecord) -> str:
    parts = []
    if names := [name for name, value in step.metrics.items() if not math.isfinite(value)]:
        parts.append(f"metrics that are not finite: {', '.join(names)}")
    if skipped := _metric(step, "skipped_updates"):
        parts.append(f"updates skipped because their gradient is not finite: {skipped:.0f}")
    if dropped := _metric(step, "dropped_tokens"):
        tokens = _metric(step, "tokens")
        parts.append(f"response tokens without a finite log-probability from the engine: {dropped:.0f} of {tokens:.0f}")
    return ", ".join(parts)


_NOT_FINITE_ADVICE = (
    "The model has weights that are NaN or infinite, or its numbers overflow: start over in another output directory "
    "with a lower algorithm.learningRate, with model.dtype: float32, or with another model"
)


@dataclass(frozen=True, slots=True)
class _Kind:
    reason: TrainingWarningReason
    applies: Callable[[StepRecord], bool]
    describe: Callable[[StepRecord], str]
    advice: str


_KINDS = (
    _Kind(
        "NumbersNotFinite",
        _lost_numbers,
        _describe_numbers,
        "if it repeats, start over with a lower algorithm.learningRate or with model.dtype: float32",
    ),
    _Kind(
        "ResponsesEmpty",
        # A response that ended at once has the end-of-sequence token alone.
        lambda step: step.response.max_tokens <= (0 if step.response.clipped_ratio else 1),
        lambda _step: "every response is empty",
        "look for an end-of-sequence token at the end of the prompts, and check the chat template of the model",
    ),
    _Kind(
        "RewardsEqual",
        lambda step: step.has_no_signal,
        lambda step: (
            "the responses to each prompt have equal rewards, from which the policy learns nothing "
            f"(mean reward {step.reward.mean:.4g})"
        ),
        "if it repeats, check the reward function, or make the task easier or harder",
    ),
    _Kind(
        "ResponsesTruncated",
        lambda step: step.response.clipped_ratio >= 1.0,
        lambda step: f"every response was cut at {step.response.max_tokens} tokens, and none ended",
        "start over with a larger algorithm.maxResponseTokens, or with a model that ends its responses",
    ),
)


_LARGEST_MEAN_NATS = 1.0
"""bfloat16 gives 0.01 to 0.05 nats, an engine in 8 bits about 0.1. A wrong scale of the logits gives several nats."""


def require_agreement(updates: Mapping[str, UpdateResult]) -> None:
    """Raise `BadInput` if the log-probabilities of the first step are not finite, or differ by more than a nat in the
    mean. NaN differs."""
    metrics = next(iter(updates.values())).metrics
    found = metrics.get("logprob_diff_mean", 0.0)
    dropped, tokens = metrics.get("dropped_tokens", 0.0), metrics.get("tokens", 0.0)
    if not math.isfinite(found) or (dropped > 0 and not dropped < tokens):
        raise BadInput(
            f"expected finite log-probabilities in the first step, found a mean difference of {found} nats between "
            f"engine and policy, and {dropped:.0f} of {tokens:.0f} response tokens without a finite log-probability "
            "from the engine: the model overflows, or its files are damaged. Write model.dtype: float32; if that does "
            "not help, use another model"
        )
    if not found <= _LARGEST_MEAN_NATS:
        raise BadInput(
            "expected engine and policy to agree on the log-probabilities of the first step, found a mean difference "
            f"of {found:.2f} nats: they compute it differently, and it would learn noise. Use another model, or "
            "remove quantization and other changes of the model from rollout.engineArgs"
        )


def require_same_updates(committed: StepRecord, updates: Mapping[str, UpdateResult]) -> None:
    """Raise `BadInput` if the replay of a committed step skipped another number of updates than the step itself."""
    before = committed.metrics.get("skipped_updates", 0.0)
    found = next(iter(updates.values())).metrics.get("skipped_updates", 0.0)
    if found != before:
        raise BadInput(
            f"expected the replay of step {committed.step} to skip {before:.0f} updates whose gradient is not finite, "
            f"as before, found {found:.0f}: the restored weights are damaged. If checkpoints has an older directory, "
            "delete the newest one to resume from it; otherwise start over in another output directory"
        )
