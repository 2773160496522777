"""Why the pods that an attempt lacks cannot be made."""

from __future__ import annotations

from rljob_api.conditions import ConditionReason
from rljob_operator.reconcile.placement import Obstacle, obstacle_to_pods
from rljob_operator.reconcile.view import JobView


def refusal(view: JobView) -> Obstacle | None:
    """Who refuses them, and what to do about it; None where nobody does."""
    if view.observed.namespace_terminating:
        return obstacle_to_pods(view)
    if foreign := _foreign_in_the_way(view):
        sentence = (
            f"the job needs the name of pod {foreign[0]}, which is not its own: delete that pod, or rename the job"
        )
        return ConditionReason.FOREIGN_POD, sentence
    if view.observed.refused:
        return ConditionReason.PODS_REFUSED, f"the API server refused: {view.observed.refused}"
    return None


def _foreign_in_the_way(view: JobView) -> list[str]:
    """Names that the attempt's pods need and that pods of somebody else have."""
    return sorted(set(view.missing) & set(view.observed.foreign_pods))
