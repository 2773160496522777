"""The policy's caching allocator: release the cache after an update, and use expandable segments.

Both act on memory that torch holds without using it. `empty_cache` releases whole free blocks to other processes on the
GPU, once per update (about 80 ms). Expandable segments leave hardly any partly used block, at no measurable cost.
Neither helps the engine's own allocator: vLLM's sleep mode has its own pool.
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family

_OF_THE_CACHE = frozenset({FailureClass.ALLOCATOR_CACHE, FailureClass.UNKNOWN})
_OF_THE_ENGINE = frozenset({FailureClass.KV_CACHE_OVERSIZED, FailureClass.WEIGHT_SYNC_SPIKE})
_CACHE_NUMBERS = {
    "policy": ("reserved_but_unallocated_bytes", "policy_cache_bytes"),
    "rollout": ("policy_cache_bytes",),  # torch's numbers in the engine's message are the engine's own
}


def _empty_cache(case: Case) -> Change | None:
    """Expected: the policy's cache, as last sampled. It helps other processes only: torch's allocator empties its own
    cache before it fails.
    """
    if case.plan.empty_cache or not case.shares_gpu or not _of_policys_allocator(case):
        return None
    if case.failure_class in _OF_THE_ENGINE and case.role != "rollout":
        return None
    return Change(True, case.number("policy_cache_bytes"))


def _expandable_segments(case: Case) -> Change | None:
    """Expected: memory that is reserved and in no tensor. The segments make a cache that can be released, and release
    nothing themselves: against AllocatorCache they help only if the cache is emptied.
    """
    if case.plan.expandable_segments or not _of_policys_allocator(case):
        return None
    if case.failure_class is FailureClass.ALLOCATOR_CACHE and not case.plan.empty_cache:
        return None
    cached = case.number(*_CACHE_NUMBERS[case.role])
    return Change(True, cached)


def _of_policys_allocator(case: Case) -> bool:
    return case.on_gpu and (case.role == "policy" or (case.role == "rollout" and case.shares_gpu))


EMPTY_CACHE = Family("empty_cache", _OF_THE_CACHE | _OF_THE_ENGINE, "Live", "policy", _empty_cache)
EXPANDABLE_SEGMENTS = Family(
    "expandable_segments", _OF_THE_CACHE | {FailureClass.FRAGMENTATION}, "Live", "policy", _expandable_segments
)
