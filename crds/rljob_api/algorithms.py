"""The algorithms: one row for each value of `spec.algorithm.name`, with the settings that it reads and their defaults.

A row names the functions of `rljob_trainer.algorithms` that compute it. To add an algorithm, add a row, its name to
`AlgorithmName`, and a function if no present one will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AlgorithmName = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]
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

    defaults: AlgorithmSettings

    advantage: str = "relative_to_group"
    """Function of `rljob_trainer.algorithms.advantages`."""

    loss: str = "clipped_ratio"
    """Function of `rljob_trainer.algorithms.losses`."""

    unread: tuple[str, ...] = ()
    """Fields of `AlgorithmSettings` that have no effect on it, and are refused."""


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "grpo": Algorithm(
        "group relative policy optimization (arXiv 2402.03300), with the loss of DAPO",
        AlgorithmSettings(clip_high=0.28, dual_clip=3.0, scale_advantages="Group"),
    ),
    "dr_grpo": Algorithm(
        "grpo without its bias by length and difficulty (arXiv 2503.20783)",
        AlgorithmSettings(loss_aggregation="ConstantLength"),
    ),
    "dapo": Algorithm(
        "higher upper clip, mean over tokens (arXiv 2503.14476)",
        AlgorithmSettings(clip_high=0.28, scale_advantages="Group"),
    ),
    "gspo": Algorithm(
        "one ratio for each response (arXiv 2507.18071)",
        AlgorithmSettings(3e-4, 4e-4, scale_advantages="Group", loss_aggregation="SequenceMean"),
        loss="clipped_sequence_ratio",
        unread=("dual_clip",),
    ),
    "cispo": Algorithm(
        "the ratio is a clipped weight, so that every token has a gradient (arXiv 2506.13585)",
        AlgorithmSettings(clip_high=4.0, scale_advantages="Group"),
        loss="clipped_weight",
        unread=("clip_low", "dual_clip"),
    ),
    "rloo": Algorithm(
        "the baseline of a response is the mean reward of the others (arXiv 2402.14740)",
        AlgorithmSettings(loss_aggregation="ConstantLength"),
        advantage="leave_one_out",
        unread=("scale_advantages",),
    ),
    "reinforce_plus_plus": Algorithm(
        "rewards normalized over the step (arXiv 2501.03262)",
        AlgorithmSettings(),
        advantage="normalized_over_step",
        unread=("scale_advantages",),
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "the same, minus the mean of the group first",
        AlgorithmSettings(),
        advantage="group_baseline_normalized_over_step",
        unread=("scale_advantages",),
    ),
}
