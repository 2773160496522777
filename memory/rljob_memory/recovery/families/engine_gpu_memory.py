"""Remedies for the GPU memory of the engine, and for the weight sync between policy and engine."""

from __future__ import annotations

from rljob_memory.budget import Place, budget
from rljob_memory.budget.gpu import SMALLEST_KV_CACHE_BYTES, smallest_kv_cache_bytes
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family
from rljob_memory.sizes import MIB

# The weight sync: the size of a bucket, and the buffer that it is packed in.
#
# Smaller buckets act on WeightSyncSpike, and on SharedMemory if the weights go through it (on a CPU); each bucket costs
# a round trip. A reserved buffer acts on Fragmentation during the sync, if no free block is large enough for a bucket.
# A buffer that only exists during a sync acts on failures of the update.

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
    before, setup = case.plan.sync_bucket_bytes, case.setup
    if setup:
        before = min(before, setup.model.weight_bytes)
    least = setup.model.largest_parameter_bytes if setup else _SMALLEST_OF_ANOTHER_TRAINER_BYTES
    after = max(before // 2, least, _SMALLEST_BUCKET_BYTES)
    if after > before - before // 8 or not _in_sync(case):
        return None
    in_shared_memory = case.failure_class is FailureClass.SHARED_MEMORY
    if in_shared_memory and case.on_gpu:
        return None
    place: Place | None = "shm" if in_shared_memory else None
    return Change(after, case.freed_bytes({"sync_bucket_bytes": after}, "sync", place))


def _in_sync(case: Case) -> bool:
    """Another trainer does not report this phase, but its stack may show it."""
    not_reported = case.setup is None and case.failure_class is FailureClass.WEIGHT_SYNC_SPIKE
    return case.phase == "sync" or not_reported


def _weight_export(case: Case) -> Change | None:
    """Expected: the buffer, as large as a bucket or the largest parameter."""
    if not case.shares_gpu or case.role != "policy":
        return None
    plan = case.plan
    if plan.weight_export == "SwitchSegments" and case.failure_class is FailureClass.FRAGMENTATION:
        return Change("ReservedBuffer", _buffer_bytes(case)) if case.phase == "sync" else None
    if plan.weight_export == "ReservedBuffer" and case.failure_class in _OF_THE_UPDATE and case.phase == "update":
        return Change("SwitchSegments", _buffer_bytes(case))
    return None


def _buffer_bytes(case: Case) -> int:
    if case.setup is None:
        return case.plan.sync_bucket_bytes
    return budget(case.setup, case.plan).bytes_of("packed bucket", "gpu")


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


# vLLM's sleep mode during the update. Levels 1 and 2 free the same GPU memory; level 2 keeps no weights on the host.
#
# Acts on EngineNotAsleep, on every failure of the policy next to an awake engine, and, from level 1 to 2, on
# HostMemory. Costs the wake-up, well under a second (vLLM, sleep mode).

_HELPED_BY_SLEEP = frozenset(
    {
        FailureClass.ENGINE_NOT_ASLEEP,
        FailureClass.ACTIVATION_SPIKE,
        FailureClass.OPTIMIZER_STATE,
        FailureClass.HOST_MEMORY,
        FailureClass.UNKNOWN,
    }
)


def _rollout_sleep(case: Case) -> Change | None:
    """Expected: the engine's weights and its KV cache on the GPU; its weights in host memory."""
    if not case.shares_gpu:
        return None
    level, on_host = case.plan.rollout_sleep_level, case.failure_class is FailureClass.HOST_MEMORY
    if level != 1 if on_host else level > 0 or case.role != "policy":
        return None
    return Change("Level2", case.freed_bytes({"rollout_sleep": "Level2"}, "update", "host" if on_host else "gpu"))


ROLLOUT_SLEEP = Family("rollout_sleep", _HELPED_BY_SLEEP, "RespawnRole", "rollout", _rollout_sleep)


# The engine's KV cache. Acts on KVCacheOversized, and on every failure next to a KV cache that is awake.
#
# A smaller cache costs throughput of the rollout phase once it holds fewer sequences than the step has.

_HELPED_BY_SMALLER_KV_CACHE = frozenset(
    {
        FailureClass.KV_CACHE_OVERSIZED,
        FailureClass.ALLOCATOR_CACHE,
        FailureClass.ENGINE_NOT_ASLEEP,
        FailureClass.WEIGHT_SYNC_SPIKE,
        FailureClass.ACTIVATION_SPIKE,
        FailureClass.UNKNOWN,
    }
)
_LEAST_SHRINK = 0.25
_MARGIN = 1.05
"""Factor on a calculated size, because other trainers round shares of the GPU."""


def _kv_cache(case: Case) -> Change | None:
    """Smaller by the missing memory, at least by a quarter, down to the cache of one sequence; in whole MiB.

    Larger if vLLM reports that the longest sequence does not fit. That happens once: between a cache that was too small
    and one that is too large, no failure shows the right size.
    """
    if needed := case.number("needed_bytes"):
        return _larger(case, needed)
    before = case.plan.kv_cache_bytes
    if not _in_the_way(case):
        return None
    smallest = smallest_kv_cache_bytes(case.setup.work, case.setup.model) if case.setup else SMALLEST_KV_CACHE_BYTES
    wanted = before - max(_missing_bytes(case, before), int(before * _LEAST_SHRINK))
    after = -(-max(wanted, smallest) // MIB) * MIB
    if after >= before:
        return None
    return Change(after, before - after if case.setup else None)  # another trainer's cache has an unknown size


def _missing_bytes(case: Case, before: int) -> int:
    """The size of another trainer's cache is unknown: of the plan's, the part that its engine's whole share lacked,
    and a little more, because it rounds shares."""
    need = case.need_bytes or 0
    if case.setup is not None:
        return need
    share = case.number("wanted_bytes")
    return int(before * _MARGIN * need / share) if share else 0


def _larger(case: Case, needed: int) -> Change | None:
    before = case.plan.kv_cache_bytes
    after = -(-needed // MIB) * MIB
    changed_before = any(change.remedy.setting == KV_CACHE.name for change in case.state.changes)
    if case.role != "rollout" or after <= before or changed_before:
        return None
    return Change(after, after - before)


def _in_the_way(case: Case) -> bool:
    if not case.on_gpu:
        return case.role != "controller" and case.setup is not None  # another trainer's engine is on GPUs
    return case.role == "rollout" or (case.role == "policy" and case.shares_gpu and case.kv_cache_is_awake)


KV_CACHE = Family("kv_cache_bytes", _HELPED_BY_SMALLER_KV_CACHE, "RespawnRole", "rollout", _kv_cache)
