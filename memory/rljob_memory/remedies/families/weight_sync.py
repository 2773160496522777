"""The weights on their way to the engine: how many at once, and where they are packed for it.

Smaller buckets act on WeightSyncSpike, and on SharedMemory where the weights go through it (on a CPU); they cost a
round trip each. A reserved buffer acts on Fragmentation during the sync, where no room for a bucket is found; the
buffer that is made for each sync acts on what is missing during the update.
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.evidence.sizes import human_bytes
from rljob_memory.remedies.case import Case
from rljob_memory.remedies.family import Change, Family

_SMALLEST_BUCKET_BYTES = 1 << 20
_OF_THE_UPDATE = frozenset({FailureClass.ACTIVATION_SPIKE, FailureClass.OPTIMIZER_STATE})


def _sync_bucket(case: Case) -> Change | None:
    """Half as large, down to the largest parameter, which is sent whole. Expected: the half that goes."""
    before = case.plan.sync_bucket_bytes
    after = max(before // 2, case.facts.largest_parameter_bytes if case.facts else 0, _SMALLEST_BUCKET_BYTES)
    if after >= before or case.phase != "sync":
        return None
    if case.failure_class is FailureClass.SHARED_MEMORY and case.on_gpu:
        return None
    return Change(after, before - after, f"weights sent {human_bytes(after)} at a time, not {human_bytes(before)}")


def _weight_export(case: Case) -> Change | None:
    """Expected: the buffer, which is as large as a bucket or the largest parameter."""
    if not case.shares_gpu or case.role != "policy":
        return None
    export, buffer = case.plan.weight_export, case.plan.sync_bucket_bytes
    if case.facts:
        buffer = max(buffer, case.facts.largest_parameter_bytes)
    if export == "SwitchSegments" and case.failure_class is FailureClass.FRAGMENTATION and case.phase == "sync":
        return Change("ReservedBuffer", buffer, "a buffer for the weights that is kept")
    if export == "ReservedBuffer" and case.failure_class in _OF_THE_UPDATE and case.phase == "update":
        return Change("SwitchSegments", buffer, "no buffer for the weights but during a sync")
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
