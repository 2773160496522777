"""What a change takes to come into force: what its setting needs, and what the process that failed needs."""

from __future__ import annotations

from rljob_api.plan_change import RemedyLevel, Role
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.case import Case
from rljob_memory.recovery.family import Family
from rljob_memory.recovery.latitude import LEVELS

_LEAVES_NO_WHOLE_PROCESS = frozenset(
    {FailureClass.HOST_MEMORY, FailureClass.SHARED_MEMORY, FailureClass.OPTIMIZER_STATE}
)
"""The kernel kills it, a bus error does, or its parameters are half-written."""
_ALL: frozenset[Role] = frozenset({"policy", "rollout"})


def needed_level(case: Case, family: Family) -> RemedyLevel:
    """The lowest level at which `family`'s change is in force and the failed process works again."""
    return max(family.level, _level_of_the_failure(case), key=LEVELS.index)


def respawned_roles(case: Case, family: Family, level: RemedyLevel) -> frozenset[Role]:
    """The roles whose processes have to be new where the change comes into force by `level`."""
    if level == "Live":
        return frozenset()
    if level != "RespawnRole":
        return _ALL
    roles: set[Role] = set()
    if family.owner and family.level != "Live":
        roles.add(family.owner)
    if _level_of_the_failure(case) != "Live":
        roles.add(case.role)
        # The other ranks wait in a collective for the one whose engine failed.
        if case.phase == "sync" and _policy_ranks_wait_for_each_other(case):
            roles.add("policy")
    return frozenset(roles or {family.owner or case.role})


def _level_of_the_failure(case: Case) -> RemedyLevel:
    """An out-of-memory exception does not harm a process by itself: what was cut short by it can.

    - An engine whose core failed is dead, and a failed wake-up maps memory twice where it is tried again (vLLM 36651).
    - With more than one policy rank, the others wait in a collective of FSDP, which cannot be redone (pytorch 44353).
    - An optimizer's step leaves parameters half-written: they have to come from a checkpoint.
    """
    if case.process_lives:
        return "Live"
    if case.role == "controller":
        return "RestartInPlace"
    whole = case.role == "policy" and case.phase is not None and not _policy_ranks_wait_for_each_other(case)
    return "Live" if whole and not case.causes & _LEAVES_NO_WHOLE_PROCESS else "RespawnRole"


def _policy_ranks_wait_for_each_other(case: Case) -> bool:
    return case.facts is None or case.facts.policy_ranks > 1
