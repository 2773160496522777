"""The size of /dev/shm. Files in it count as host memory of the pod.

Acts on SharedMemory, unless the pod's memory limit is what keeps it small.
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.families.host_memory import limit_bytes, limits_shared_memory, shared_memory_bytes
from rljob_memory.recovery.family import Change, Family
from rljob_memory.recovery.plan_text import text_of
from rljob_memory.sizes import human_bytes


def _next_change(case: Case) -> Change | None:
    """Twice as large, up to the bound. Expected: the difference."""
    before, most = shared_memory_bytes(case), _most_bytes(case)
    if before is None or most is None or before >= most or limits_shared_memory(case):
        return None
    after = min(_wanted(before, case.need_bytes), most)
    return Change(after, after - before)


def _most_bytes(case: Case) -> int | None:
    """`recovery.maxSharedMemory`, else half the memory limit of the pod that failed."""
    if case.constraints.recovery.max_shared_memory is not None:
        return case.constraints.recovery.max_shared_memory
    limit = limit_bytes(case)
    return limit // 2 if limit is not None else None


def _wanted(before: int, need: int | None) -> int:
    return max(2 * before, before + (need or 0))


def _bound(case: Case) -> str | None:
    before, most = shared_memory_bytes(case), _most_bytes(case)
    if before is None or limits_shared_memory(case):
        return None
    if case.constraints.available_level("ReplacePods") is None:
        return f"/dev/shm has {human_bytes(before)}: make it larger on this machine (docker run --shm-size)"
    enough = text_of("shared_memory_bytes", _wanted(before, case.need_bytes))
    if most is None or before >= most:
        return f"/dev/shm has {human_bytes(before)}, its maximum: write recovery.maxSharedMemory: {enough}"
    return None


SHARED_MEMORY = Family(
    "shared_memory_bytes", frozenset({FailureClass.SHARED_MEMORY}), "ReplacePods", None, _next_change, _bound
)
