"""The algorithms: one row for each value of `spec.algorithm.name`, with the settings that it reads and their defaults.

A row names the functions of `rljob_trainer.algorithms` that compute it. To add an algorithm, add a row, and a function
if no present one will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

ScaleAdvantages = Literal["Group", "None"]
LossAggregation = Literal["TokenMean", "SequenceMean", "ConstantLength"]


@dataclass(frozen=True, slots=True)
class AlgorithmSettings:
    """The settings whose default depends on the algorithm. Their meaning is documented in `AlgorithmSpec`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    scale_advantages: ScaleAdvantages = "None"
    loss_aggregation: LossAggregation = "TokenMean"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm."""

    summary: str
    """Description, with the source."""

    use: str
    """The case to use it in, for the table of algorithms in the docs."""

    defaults: AlgorithmSettings

    advantage: str = "relative_to_group"
    """Function of `rljob_trainer.algorithms.advantages`."""

    loss: str = "clipped_ratio"
    """Function of `rljob_trainer.algorithms.losses`."""

    unread: tuple[str, ...] = ()
    """Fields of `AlgorithmSettings` that have no effect on it, and are refused."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        "group relative policy optimization: reward minus the mean of its group, divided by the group's standard "
        "deviation (arXiv 2402.03300), with the loss of DAPO and dual clip (arXiv 1912.09729)",
        "first",
        AlgorithmSettings(clip_high=0.28, dual_clip=3.0, scale_advantages="Group"),
    ),
    "dr_grpo": Algorithm(
        "grpo without its bias by length and difficulty: no division by the deviation, and each token weighs "
        "1 / maxResponseTokens (arXiv 2503.20783)",
        "if responses grow without a better reward",
        AlgorithmSettings(loss_aggregation="ConstantLength"),
    ),
    "dapo": Algorithm(
        "grpo with a higher upper clip, so that rare tokens may become likely (arXiv 2503.14476)",
        "if `entropy` falls early, with `updatesPerStep` above 1",
        AlgorithmSettings(clip_high=0.28, scale_advantages="Group"),
    ),
    "gspo": Algorithm(
        "grpo with one ratio for each response, the geometric mean of those of its tokens (arXiv 2507.18071)",
        "for long responses and several updates a step",
        AlgorithmSettings(3e-4, 4e-4, scale_advantages="Group", loss_aggregation="SequenceMean"),
        loss="clipped_sequence_ratio",
        unread=("dual_clip",),
    ),
    "cispo": Algorithm(
        "grpo with the ratio as a weight, clipped from above and without gradient, so that no token loses its gradient "
        "(arXiv 2506.13585)",
        "with stale rollouts and many updates a step",
        AlgorithmSettings(clip_high=4.0, scale_advantages="Group"),
        loss="clipped_weight",
        unread=("clip_low", "dual_clip"),
    ),
    "rloo": Algorithm(
        "reward minus the mean reward of the other responses (arXiv 2402.14740)",
        "for small groups and rewards on a scale that matters",
        AlgorithmSettings(loss_aggregation="ConstantLength"),
        advantage="leave_one_out",
        unread=("scale_advantages",),
    ),
    "opo": Algorithm(
        "reward minus the mean of its group weighted by length, the baseline of least variance (arXiv 2505.23585)",
        "with `updatesPerStep: 1`, if the lengths of responses differ widely",
        AlgorithmSettings(),
        advantage="relative_to_length_weighted_mean",
        unread=("scale_advantages",),
    ),
    "reinforce_plus_plus": Algorithm(
        "reward, normalized over all tokens of the step (arXiv 2501.03262)",
        "if rewards of different prompts are comparable",
        AlgorithmSettings(),
        advantage="normalized_over_step",
        unread=("scale_advantages",),
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "reinforce_plus_plus for the reward minus the mean of its group",
        "if groups often have nearly equal rewards",
        AlgorithmSettings(),
        advantage="group_baseline_normalized_over_step",
        unread=("scale_advantages",),
    ),
}

if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(ALGORITHMS)]
