"""Remedies for host memory: the limits of the containers, and the size of /dev/shm."""

from __future__ import annotations

from math import ceil

from rljob_api.plan_change import RemedyLevel
from rljob_memory.budget import budget
from rljob_memory.diagnosis import FailureClass
from rljob_memory.plan_settings import text_of
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family
from rljob_memory.sizes import MIB, human_bytes

# The host memory limit of a worker's container, or of the controller's, within the job's bound.
#
# Acts on HostMemory, and on SharedMemory if this limit is what keeps /dev/shm small.
#
# Without `recovery.maxHostMemory`, the limit of a template stays, and one that RLJob has predicted may be doubled.

_GROWTH = 1.5
_PREDICTION_GROWTH = 2
"""Factors on the present limit, and on the predicted size as an upper bound."""
_ACTS_ON = frozenset({FailureClass.HOST_MEMORY, FailureClass.SHARED_MEMORY})
_LEVEL: RemedyLevel = "ReplacePods"


def _workers(case: Case) -> Change | None:
    return None if case.role == "controller" else _raised(case)


def _controllers(case: Case) -> Change | None:
    return _raised(case) if case.role == "controller" else None


def _limit_bytes(case: Case) -> int | None:
    """The limit of the failed container, or the host memory of its machine; None if neither is known."""
    of_the_machine = case.setup.hardware.host_memory_bytes if case.setup and case.role != "controller" else None
    return _container_limit_bytes(case) or of_the_machine or None


def _shared_memory_bytes(case: Case) -> int | None:
    """Size that /dev/shm was given in the pod that failed; None if it is not known."""
    of_the_machine = case.setup.hardware.shared_memory_bytes if case.setup else None
    return case.plan.shared_memory_bytes or case.constraints.shared_memory_bytes or of_the_machine or None


def _limits_shared_memory(case: Case) -> bool:
    """True if /dev/shm becomes larger only with the limit of the container: the kubelet makes an emptyDir in memory no
    larger than the memory that its pod may use, whatever its sizeLimit."""
    limit, size = _container_limit_bytes(case), _shared_memory_bytes(case)
    return _can_replace_pods(case) and limit is not None and size is not None and size >= limit


def _is_the_cause(case: Case) -> bool:
    return case.failure_class is FailureClass.HOST_MEMORY or _limits_shared_memory(case)


def _container_limit_bytes(case: Case) -> int | None:
    """The larger of the pod's limit and the plan's, which applies to all workers and lowers none."""
    plan = case.plan
    planned = plan.controller_host_memory_bytes if case.role == "controller" else plan.host_memory_bytes
    return max(planned or 0, case.constraints.host_memory_limit_bytes or 0) or None


def _most_limit_bytes(case: Case) -> int | None:
    """The bound of the limit; None if it must stay."""
    most, predicted = case.constraints.recovery.max_host_memory, case.constraints.predicted_host_memory_limit_bytes
    return _PREDICTION_GROWTH * predicted if most is None and predicted is not None else most


def _raised(case: Case) -> Change | None:
    """Half as much again, or what the job is predicted to need if that is more, up to the bound. Expected: the
    difference."""
    before, most = _container_limit_bytes(case), _most_limit_bytes(case)
    if not _can_replace_pods(case):
        before = _limit_bytes(case)  # its supervisor knows the pod
    if before is None or most is None or before >= most or not _is_the_cause(case):
        return None
    after = min(_wanted_limit_bytes(before, case), most)
    return Change(after, after - before)


def _can_replace_pods(case: Case) -> bool:
    return case.constraints.available_level(_LEVEL) is not None


def _wanted_limit_bytes(before: int, case: Case) -> int:
    predicted = 0
    if case.setup and case.role != "controller":
        predicted = budget(case.setup, case.plan).peak("host", pod=case.pod)
    wanted = max(before * _GROWTH, before + (case.need_bytes or 0), predicted)
    return ceil(wanted / MIB) * MIB  # as a readable quantity


def _workers_bound(case: Case) -> str | None:
    return None if case.role == "controller" else _limit_bound(case)


def _controllers_bound(case: Case) -> str | None:
    return _limit_bound(case) if case.role == "controller" else None


def _limit_bound(case: Case) -> str | None:
    if not _is_the_cause(case):
        return None
    line = _bound_of_the_limit(case)
    if line is not None and case.failure_class is FailureClass.SHARED_MEMORY:
        return f"/dev/shm cannot be larger than the memory limit; {line}"
    return line


def _bound_of_the_limit(case: Case) -> str | None:
    machine, before, most = _limit_bytes(case), _container_limit_bytes(case), case.constraints.recovery.max_host_memory
    if machine is not None and not _can_replace_pods(case):
        return f"this machine has only {human_bytes(machine)} of host memory: use one that has more"
    if before is None:
        return (
            f"the {case.role}'s container has no memory limit, so its node ran out of memory: "
            "set resources.limits.memory"
        )
    enough = text_of("host_memory_bytes", _wanted_limit_bytes(before, case))
    if most is None:
        return f"recovery.maxHostMemory is absent, so the limit of {human_bytes(before)} stays: write {enough}"
    return f"recovery.maxHostMemory is {human_bytes(most)}: write {enough}" if before >= most else None


HOST_MEMORY = Family("host_memory_bytes", _ACTS_ON, _LEVEL, None, _workers, _workers_bound)
CONTROLLER_HOST_MEMORY = Family(
    "controller_host_memory_bytes", _ACTS_ON, _LEVEL, None, _controllers, _controllers_bound
)


# The size of /dev/shm. Files in it count as host memory of the pod.
#
# Acts on SharedMemory, unless the pod's memory limit is what keeps it small.


def _larger_shared_memory(case: Case) -> Change | None:
    """Twice as large, up to the bound. Expected: the difference."""
    before, most = _shared_memory_bytes(case), _most_shared_memory_bytes(case)
    if before is None or most is None or before >= most or _limits_shared_memory(case):
        return None
    after = min(_wanted_shared_memory_bytes(before, case.need_bytes), most)
    return Change(after, after - before)


def _most_shared_memory_bytes(case: Case) -> int | None:
    """`recovery.maxSharedMemory`, else half the memory limit of the pod that failed."""
    if case.constraints.recovery.max_shared_memory is not None:
        return case.constraints.recovery.max_shared_memory
    limit = _limit_bytes(case)
    return limit // 2 if limit is not None else None


def _wanted_shared_memory_bytes(before: int, need: int | None) -> int:
    return max(2 * before, before + (need or 0))


def _shared_memory_bound(case: Case) -> str | None:
    before, most = _shared_memory_bytes(case), _most_shared_memory_bytes(case)
    if before is None or _limits_shared_memory(case):
        return None
    if case.constraints.available_level("ReplacePods") is None:
        return f"/dev/shm has {human_bytes(before)}: make it larger on this machine (docker run --shm-size)"
    enough = text_of("shared_memory_bytes", _wanted_shared_memory_bytes(before, case.need_bytes))
    if most is None or before >= most:
        return f"/dev/shm has {human_bytes(before)}, its maximum: write recovery.maxSharedMemory: {enough}"
    return None


SHARED_MEMORY = Family(
    "shared_memory_bytes",
    frozenset({FailureClass.SHARED_MEMORY}),
    "ReplacePods",
    None,
    _larger_shared_memory,
    _shared_memory_bound,
)
