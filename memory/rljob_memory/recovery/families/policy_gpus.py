"""GPUs of the policy: the last resort, since it costs the cluster resources and acts on no cause in particular.

Weights, gradients and optimizer state are divided among the ranks, and so are the sequences of a step. The gradient of
a step stays the same, except for the order of floating-point additions.
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family
from rljob_memory.recovery.growth import PolicyGrowth

_NOT_OF_THE_POLICY = frozenset(
    {
        FailureClass.FOREIGN_PROCESS,
        FailureClass.CONTROLLER_CONTEXT,
        FailureClass.RETAINED_GRAPH,
        FailureClass.SHARED_MEMORY,
    }
)
"""Memory that the ranks do not divide."""


def _next_change(case: Case) -> Change | None:
    """The next larger policy. Expected: the part of weights, gradients and optimizer state that leaves a rank."""
    growth = _growth_that_helps(case)
    if growth is None or not growth.larger or not _has_room(growth):
        return None
    ranks = growth.larger[0]
    return Change(ranks, _freed_bytes(case, growth.ranks, ranks), before=growth.ranks)


def _growth_that_helps(case: Case) -> PolicyGrowth | None:
    growth = case.constraints.growth
    if growth is None or case.role != "policy" or case.diagnosis.class_name in _NOT_OF_THE_POLICY:
        return None
    if case.diagnosis.class_name == FailureClass.HOST_MEMORY and (case.on_gpu or growth.level != "ReplacePods"):
        return None  # ranks on one machine share its host memory
    return growth.from_ranks(case.plan.policy_gpus or growth.ranks)


def _has_room(growth: PolicyGrowth) -> bool:
    return growth.room is None or growth.larger[0] <= growth.room


def _freed_bytes(case: Case, before: int, after: int) -> int | None:
    profile = case.profile
    if profile is None:
        return None
    state = profile.trained_bytes or profile.optimizer_bytes
    state += 0 if case.plan.optimizer_offload else profile.optimizer_bytes
    return state * (after - before) // after


def _bound(case: Case) -> str | None:
    growth = _growth_that_helps(case)
    if growth is None:
        return None
    if growth.larger and not _has_room(growth):
        return (
            f"the policy could grow from {growth.ranks} to {growth.larger[0]} GPUs, but this machine has only "
            f"{growth.room} for it: use one that has more, or a cluster"
        )
    if growth.larger:
        return None
    return (
        f"recovery.maxGpus is {growth.most}, and the policy has {growth.ranks} GPUs: raise it to the next power of two "
        "that divides algorithm.promptsPerStep"
    )


POLICY_GPUS = Family("policy_gpus", frozenset(), "ReplacePods", "policy", _next_change, _bound)
