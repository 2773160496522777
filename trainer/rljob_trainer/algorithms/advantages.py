"""Advantages: functions of a step's rewards, by group. Free of torch, since the controller computes them.

Each returns an array of [prompts, group size]; the values of responses that take no part are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_api.algorithms import AlgorithmSettings
from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import FloatArray, RolloutBatch

Values = npt.NDArray[np.float64]

_EPSILON = 1e-6
"""Added to a standard deviation."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The scored responses of a step. All arrays are of [prompts, group size]."""

    rewards: Values
    """Finite; 0 for responses that take no part."""

    kept: npt.NDArray[np.bool_]
    """False: the response takes no part in the update, nor in the statistics of its group."""

    tokens: npt.NDArray[np.int64]
    """Tokens of the response."""


AdvantageFunction = Callable[[Groups, AlgorithmSettings], Values]


def relative_to_group(groups: Groups, settings: AlgorithmSettings) -> Values:
    """`(R − mean) / (std + 1e-6)`, or `R − mean` with scaleAdvantages None. A group of equal rewards gets exactly 0.

    The standard deviation is the unbiased one (divisor n − 1). Source: GRPO (arXiv 2402.03300, eq. 3 ff.); without the
    deviation, Dr. GRPO (arXiv 2503.20783).
    """
    centered = _centered(groups)
    if settings.scale_advantages == "Group":
        squares = np.square(centered).sum(axis=1, keepdims=True)
        centered /= np.sqrt(squares / np.maximum(_count(groups) - 1, 1)) + _EPSILON
    return centered


def leave_one_out(groups: Groups, settings: AlgorithmSettings) -> Values:
    """R minus the mean reward of the other responses of the group; 0 without others.

    Source: RLOO (arXiv 2402.14740, eq. 8). The baseline without itself scales `R − mean` by n / (n − 1).
    """
    count = _count(groups)
    return np.asarray(_centered(groups) * (count / np.maximum(count - 1, 1)))


def relative_to_length_weighted_mean(groups: Groups, settings: AlgorithmSettings) -> Values:
    """R minus the mean reward of the tokens of the group; the mean of an empty group is that of its responses.

    Source: OPO (arXiv 2505.23585). It is the baseline that minimizes the variance of the gradient if the squared norm
    of a response's gradient is proportional to its length.
    """
    centered, tokens = _centered(groups), np.where(groups.kept, groups.tokens, 0)
    mean = (tokens * centered).sum(axis=1, keepdims=True) / np.maximum(tokens.sum(axis=1, keepdims=True), 1)
    return np.asarray(centered - mean)


def normalized_over_step(groups: Groups, settings: AlgorithmSettings) -> Values:
    """`(R − mean) / (std + 1e-6)` over the tokens of the step, each of which has the reward of its response; 0 for an
    empty response.

    Source: REINFORCE++ (arXiv 2501.03262), which normalizes the advantages of tokens; the standard deviation is that of
    the population, as in OpenRLHF.
    """
    return _normalized(groups.rewards, groups)


def group_baseline_normalized_over_step(groups: Groups, settings: AlgorithmSettings) -> Values:
    """The same for the rewards minus the mean of their group. Source: REINFORCE++-baseline (arXiv 2501.03262)."""
    return _normalized(_centered(groups), groups)


OF_GROUPS = frozenset(each.__name__ for each in (relative_to_group, leave_one_out, relative_to_length_weighted_mean))
"""Functions that compute the advantages of a group from this group alone."""


def scored(
    batch: RolloutBatch,
    rewards: FloatArray,
    function: AdvantageFunction,
    settings: AlgorithmSettings,
    reward_errors: int = 0,
) -> RolloutBatch:
    """`batch` with its `rewards` and their advantages, [completions] each. Responses that take no part get 0.

    Raises `BadInput` for a reward or an advantage that is not finite, `ValueError` if the rewards do not form groups.
    """
    size, kept = batch.group_size, batch.takes_part
    if size < 1 or len(rewards) % size or len(rewards) != len(batch):
        raise ValueError(f"expected {len(batch)} rewards in whole groups of {size}, found {len(rewards)}")
    _require_finite(rewards, kept, "rewards", "check the reward function")
    lengths = np.asarray([len(response) for response in batch.response_ids], np.int64)
    values = np.where(kept, rewards, 0).astype(np.float64)
    groups = Groups(values.reshape(-1, size), kept.reshape(-1, size), lengths.reshape(-1, size))
    advantages = np.where(kept, np.asarray(function(groups, settings), np.float64).reshape(-1), 0)
    _require_finite(advantages, kept, "advantages", "check the advantage function")
    return batch.scored(rewards, advantages.astype(np.float32), reward_errors)


def groups_without_gradient(batch: RolloutBatch) -> int:
    """Number of groups of a scored batch whose advantages are all 0: the policy learns nothing from them."""
    return int((batch.advantages.reshape(-1, batch.group_size) == 0).all(axis=1).sum())


def _count(groups: Groups) -> Values:
    """[prompts, 1] Responses that take part."""
    return np.asarray(groups.kept.sum(axis=1, keepdims=True), np.float64)


def _centered(groups: Groups) -> Values:
    """The rewards minus the mean of their group; 0 for responses that take no part."""
    mean = groups.rewards.sum(axis=1, keepdims=True) / np.maximum(_count(groups), 1)
    return np.where(groups.kept, groups.rewards - mean, 0)


def _normalized(values: Values, groups: Groups) -> Values:
    weights = np.where(groups.kept, groups.tokens, 0)
    total = weights.sum()
    if not total:
        return np.zeros_like(values)
    values = values - values[groups.kept][0]  # so that equal values give exactly 0
    centered = values - (weights * values).sum() / total
    deviation = np.sqrt((weights * np.square(centered)).sum() / total)
    return np.where(weights > 0, centered / (deviation + _EPSILON), 0)


def _require_finite(values: npt.NDArray[np.floating], kept: npt.NDArray[np.bool_], name: str, advice: str) -> None:
    finite = np.isfinite(values) | ~kept
    if not finite.all():
        first = int(np.argmin(finite))
        raise BadInput(f"expected finite {name}, found {values[first]} for completion {first}; {advice}")
