"""The advantage of GRPO: the reward of each completion relative to its group."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import FloatArray

ScaleAdvantages = Literal["Group", "None"]
"""Values of `algorithm.scaleAdvantages`."""

_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""


def group_advantages(rewards: FloatArray, group_size: int, *, scale: ScaleAdvantages) -> FloatArray:
    """Advantage of each completion in its group: `(R − mean) / (std + 1e-6)`, or `R − mean` if `scale` is "None".

    `rewards`: [completions], group-major, finite. Returns [completions], float32. The standard deviation is the
    unbiased one (divisor n − 1). A group whose rewards are all equal gets exactly 0.

    Source: GRPO (arXiv 2402.03300, eq. 3 ff.). `scale="None"` is one of the two changes of Dr. GRPO (arXiv 2503.20783).
    Its other one, sums over tokens that are divided by a constant length, is not supported: TokenMean divides by the
    tokens of the step.
    Raises `BadInput` for a reward that is not finite, `ValueError` if the rewards do not form whole groups.
    """
    groups = _groups(rewards, group_size)
    centered = groups - groups.mean(axis=1, keepdims=True)
    if scale == "Group" and group_size > 1:
        centered /= groups.std(axis=1, ddof=1, keepdims=True) + _EPSILON
    return np.asarray(centered.reshape(-1), np.float32)


def uniform_groups(rewards: FloatArray, group_size: int) -> int:
    """Number of groups whose rewards, [completions] group-major, are all equal: the policy learns nothing from them.

    Raises as `group_advantages`.
    """
    groups = _groups(rewards, group_size)
    return int((groups == groups[:, :1]).all(axis=1).sum())


def _groups(rewards: FloatArray, group_size: int) -> npt.NDArray[np.float64]:
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"expected whole groups of {group_size} rewards, found {len(rewards)} rewards")
    finite = np.isfinite(rewards)
    if not finite.all():
        first = int(np.argmin(finite))
        raise BadInput(
            f"expected finite rewards, found {rewards[first]} for completion {first}; check the reward function"
        )
    return rewards.astype(np.float64).reshape(-1, group_size)
