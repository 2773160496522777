"""Next values of a pod's host memory limit and of its /dev/shm, within the bounds of the job.

Without `recovery.maxHostMemory`, the limit of a template stays, and one that RLJob has predicted may be doubled. Files
in /dev/shm count as host memory of the pod: the kubelet makes it no larger than the memory that the pod may use.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TypeVar

from rljob_memory.budget import budget
from rljob_memory.diagnosis import FailureClass
from rljob_memory.plan_settings import planned_host_memory, text_of
from rljob_memory.recovery.failure import Case
from rljob_memory.sizes import MIB, human_bytes

_GROWTH = 1.5
_PREDICTION_GROWTH = 2


T = TypeVar("T")


def of_a_worker(decide: Callable[[Case], T | None]) -> Callable[[Case], T | None]:
    """The decision, if a worker failed."""
    return lambda case: None if case.role == "controller" else decide(case)


def of_the_controller(decide: Callable[[Case], T | None]) -> Callable[[Case], T | None]:
    """The decision, if the controller failed."""
    return lambda case: decide(case) if case.role == "controller" else None


def larger_limit(case: Case) -> int | None:
    """Half as much again, or what the job is predicted to need if that is more, up to the bound."""
    bounds, most = case.constraints, case.constraints.recovery.max_host_memory
    if most is None and bounds.predicted_host_memory_limit_bytes is not None:
        most = _PREDICTION_GROWTH * bounds.predicted_host_memory_limit_bytes
    before = limit_bytes(case)
    if before is None or most is None or before >= most or not _limit_is_the_cause(case):
        return None
    return min(_wanted_limit_bytes(before, case), most)


def limit_bytes(case: Case) -> int | None:
    """The limit in force; without new pods, the supervisor knows it, and here the machine's host memory counts, too."""
    limit = _container_limit_bytes(case)
    return limit if case.constraints.can_replace_pods else limit or _machine_bytes(case)


def bound_of_limit(case: Case) -> str | None:
    """The line about the host memory limit that prevents a change."""
    if not _limit_is_the_cause(case):
        return None
    bounds, before = case.constraints, _container_limit_bytes(case)
    most, machine = bounds.recovery.max_host_memory, before or _machine_bytes(case)
    if machine is not None and not bounds.can_replace_pods:
        line = f"this machine has only {human_bytes(machine)} of host memory: use one that has more"
    elif before is None:
        line = f"the {case.role}'s container has no memory limit, so its node ran out of memory: "
        line += "set resources.limits.memory"
    elif most is not None and before < most:
        return None
    else:
        found = "absent" if most is None else human_bytes(most)
        stays = f", so the limit of {human_bytes(before)} stays" if most is None else ""
        enough = text_of("host_memory_bytes", _wanted_limit_bytes(before, case))
        line = f"recovery.maxHostMemory is {found}{stays}: write {enough}"
    is_of_shared_memory = case.failure_class is FailureClass.SHARED_MEMORY
    return f"/dev/shm cannot be larger than the memory limit; {line}" if is_of_shared_memory else line


def larger_shared_memory(case: Case) -> int | None:
    """Twice as large, or enough for the request, up to `recovery.maxSharedMemory` or half the memory limit."""
    before, most = shared_memory_bytes(case), _most_shared_memory_bytes(case)
    if before is None or most is None or before >= most or _limit_bounds_shared_memory(case):
        return None
    return min(_wanted_shared_memory_bytes(before, case), most)


def shared_memory_bytes(case: Case) -> int | None:
    """Size that /dev/shm was given in the pod that failed; None if it is not known."""
    of_the_machine = case.setup.hardware.shared_memory_bytes if case.setup else None
    return case.plan.shared_memory_bytes or case.constraints.shared_memory_bytes or of_the_machine or None


def bound_of_shared_memory(case: Case) -> str | None:
    """The line about the size of /dev/shm that prevents a change."""
    before, most = shared_memory_bytes(case), _most_shared_memory_bytes(case)
    if before is None or _limit_bounds_shared_memory(case):
        return None
    if not case.constraints.can_replace_pods:
        return f"/dev/shm has {human_bytes(before)}: make it larger on this machine (docker run --shm-size)"
    if most is not None and before < most:
        return None
    enough = text_of("shared_memory_bytes", _wanted_shared_memory_bytes(before, case))
    return f"/dev/shm has {human_bytes(before)}, its maximum: write recovery.maxSharedMemory: {enough}"


def _container_limit_bytes(case: Case) -> int | None:
    """The larger of the pod's limit and the plan's, which applies to all workers and lowers none."""
    return max(planned_host_memory(case.plan, case.role) or 0, case.constraints.host_memory_limit_bytes or 0) or None


def _machine_bytes(case: Case) -> int | None:
    return (case.setup.hardware.host_memory_bytes or None) if case.setup and case.role != "controller" else None


def _limit_is_the_cause(case: Case) -> bool:
    return case.failure_class is FailureClass.HOST_MEMORY or _limit_bounds_shared_memory(case)


def _limit_bounds_shared_memory(case: Case) -> bool:
    limit, size = _container_limit_bytes(case), shared_memory_bytes(case)
    return case.constraints.can_replace_pods and limit is not None and size is not None and size >= limit


def _wanted_limit_bytes(before: int, case: Case) -> int:
    predicted = 0
    if case.setup and case.role != "controller":
        predicted = budget(case.setup, case.plan).peak("host", pod=case.pod)
    wanted = max(before * _GROWTH, before + (case.need_bytes or 0), predicted)
    return ceil(wanted / MIB) * MIB  # as a whole quantity, for people


def _most_shared_memory_bytes(case: Case) -> int | None:
    if case.constraints.recovery.max_shared_memory is not None:
        return case.constraints.recovery.max_shared_memory
    limit = _container_limit_bytes(case) or _machine_bytes(case)
    return limit // 2 if limit is not None else None


def _wanted_shared_memory_bytes(before: int, case: Case) -> int:
    return max(2 * before, before + (case.need_bytes or 0))
