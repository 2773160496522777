"""The engine's KV cache. Acts on KVCacheOversized, and on every failure beside a KV cache that is awake.

A smaller cache costs throughput of the rollout phase once it holds fewer sequences than the step has.
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family
from rljob_memory.sizes import MIB

_ACTS_ON = frozenset(
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
_SMALLEST_BYTES = 64 * MIB
_MARGIN = 1.05


def _next_change(case: Case) -> Change | None:
    """Smaller by the missing memory, at least by a quarter, down to the cache of one sequence; in whole MiB.

    Larger if vLLM reports that the longest sequence does not fit. That happens once: between a cache that was too small
    and one that is too large, no failure shows the right size.
    """
    if needed := case.number("needed_bytes"):
        return _larger(case, needed)
    before = case.plan.kv_cache_bytes
    if not _in_the_way(case):
        return None
    smallest = max(case.profile.smallest_kv_cache_bytes if case.profile else 0, _SMALLEST_BYTES)
    wanted = before - max(_missing_bytes(case, before), int(before * _LEAST_SHRINK))
    after = -(-max(wanted, smallest) // MIB) * MIB
    if after >= before:
        return None
    return Change(after, before - after if case.profile else None)  # another trainer's cache has an unknown size


def _missing_bytes(case: Case, before: int) -> int:
    """The size of another trainer's cache is unknown: of the plan's, the part that its engine's whole share lacked,
    and a little more, because it rounds shares."""
    need = case.need_bytes or 0
    if case.profile is not None:
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
        return case.role != "controller" and case.profile is not None  # another trainer's engine is on GPUs
    return case.role == "rollout" or (case.role == "policy" and case.shares_gpu and case.kv_cache_is_awake)


KV_CACHE = Family("kv_cache_bytes", _ACTS_ON, "RespawnRole", "rollout", _next_change)
