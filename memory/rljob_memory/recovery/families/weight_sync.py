"""The weight sync: the size of a bucket, and the buffer that it is packed in.

Smaller buckets act on WeightSyncSpike, and on SharedMemory if the weights go through it (on a CPU); each bucket costs a
round trip. A reserved buffer acts on Fragmentation during the sync, if no free block is large enough for a bucket. A
buffer that only exists during a sync acts on failures of the update.
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family

_SMALLEST_BUCKET_BYTES = 1 << 20
_SMALLEST_OF_ANOTHER_TRAINER_BYTES = 1 << 27
"""An eighth of the first plan's: of verl's default, that is the least that the adapter sets."""
_OF_THE_UPDATE = frozenset({FailureClass.ACTIVATION_SPIKE, FailureClass.OPTIMIZER_STATE})


def _sync_bucket(case: Case) -> Change | None:
    """Half the bucket, down to the largest parameter, which is sent whole.

    Expected: the difference, once as gathered parameters and once packed: with all weights in one bucket, a sync on an
    H200 allocated twice their bytes. In shared memory there is only the packed copy. None if less than an eighth of the
    bucket is left to free: the first plan's bucket is that of the largest parameter, rounded up.
    """
    before, profile = case.plan.sync_bucket_bytes, case.profile
    if profile:
        before = min(before, profile.weight_bytes)
    least = profile.largest_parameter_bytes if profile else _SMALLEST_OF_ANOTHER_TRAINER_BYTES
    after = max(before // 2, least, _SMALLEST_BUCKET_BYTES)
    if after > before - before // 8 or not _in_sync(case):
        return None
    in_shared_memory = case.failure_class is FailureClass.SHARED_MEMORY
    if in_shared_memory and case.on_gpu:
        return None
    if profile is None:
        return Change(after, None)
    return Change(after, (1 if in_shared_memory else 2) * (before - after))


def _in_sync(case: Case) -> bool:
    """Another trainer does not report this phase, but its stack may show it."""
    not_reported = case.profile is None and case.failure_class is FailureClass.WEIGHT_SYNC_SPIKE
    return case.phase == "sync" or not_reported


def _weight_export(case: Case) -> Change | None:
    """Expected: the buffer, as large as a bucket or the largest parameter."""
    if not case.shares_gpu or case.role != "policy":
        return None
    export, buffer = case.plan.weight_export, case.plan.sync_bucket_bytes
    if case.profile:
        buffer = max(buffer, case.profile.largest_parameter_bytes)
    if export == "SwitchSegments" and case.failure_class is FailureClass.FRAGMENTATION and case.phase == "sync":
        return Change("ReservedBuffer", buffer)
    if export == "ReservedBuffer" and case.failure_class in _OF_THE_UPDATE and case.phase == "update":
        return Change("SwitchSegments", buffer)
    return None


SYNC_BUCKET = Family(
    "sync_bucket_bytes",
    frozenset({FailureClass.WEIGHT_SYNC_SPIKE, FailureClass.SHARED_MEMORY, FailureClass.UNKNOWN}),
    "Live",
    "policy",
    _sync_bucket,
)
WEIGHT_EXPORT = Family(
    "weight_export", _OF_THE_UPDATE | {FailureClass.FRAGMENTATION}, "RespawnRole", "policy", _weight_export
)
