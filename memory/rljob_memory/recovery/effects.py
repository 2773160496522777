"""Effects of a change: the memory that it should free, and the memory that it has freed."""

from __future__ import annotations

from rljob_api.plan_change import PlanChange, Role
from rljob_api.step_report import RankMemory
from rljob_memory.budget import budget
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.remedies import REMEDIES, Remedy


def expected_bytes(case: Case, remedy: Remedy, value: object) -> int | None:
    """Memory that `remedy` frees with `value`, or adds to a size that was too small; None if that is unknown.

    It is the excess that the diagnosis names, else the difference of two budgets.
    """
    if remedy.excess is not None:
        return remedy.excess(case)
    before = remedy.value_before(case)
    if remedy.setting.endswith("_bytes") and isinstance(before, int) and isinstance(value, int) and value > before:
        return value - before
    freed = case.freed_bytes(remedy.fields_changed(case, value), remedy.phase)
    return freed if freed is None else min(freed, _visible_bytes(case, remedy, value, freed))


def _visible_bytes(case: Case, remedy: Remedy, value: object, freed: int) -> int:
    """The most that can be seen of an effect if an update failed before its peak: the memory in use plus the failed
    request, less the need after the change; but at least half of the request."""
    allocated, requested = case.number("allocated_bytes"), case.number("requested_bytes")
    of_the_update = case.on_gpu and case.in_micro_batch and remedy.owner == "policy" and remedy.phase == "update"
    if case.setup is None or allocated is None or requested is None or not of_the_update:
        return freed
    plan = case.plan.model_copy(update=remedy.fields_changed(case, value))
    needed = budget(case.setup, plan).in_torch("policy", "update")
    return max(allocated + requested - needed, requested // 2)


_MORE_ROOM = frozenset(remedy.name for remedy in REMEDIES if remedy.present and remedy.owner is None)
_OF_THE_POLICY = frozenset(
    remedy.name for remedy in REMEDIES if remedy.owner == "policy" and remedy.setting != "policy_offload"
)
"""Settings with an effect on the memory of the policy in its own phases."""


def observed(change: PlanChange, before: RankMemory | None, after: RankMemory | None) -> PlanChange:
    """`change` with `remedy.observedBytes`: memory that the failed phase needed, less the memory of its success.

    `before`: memory of the process that failed, at its failure. `after`: over the same phase, once it succeeded, of the
    same rank of `role_that_shows`. The request that failed counts as needed. Negative if more was in use; absent if the
    effect cannot be measured.
    """
    freed = change.remedy.expected_bytes if change.remedy.setting in _MORE_ROOM else _freed_bytes(change, before, after)
    return change.model_copy(update={"remedy": change.remedy.model_copy(update={"observed_bytes": freed})})


def role_that_shows(change: PlanChange) -> Role:
    """Role whose memory shows the effect of `change`: the policy for its own settings, else the failed role."""
    return "policy" if change.remedy.setting in _OF_THE_POLICY else change.role


def _freed_bytes(change: PlanChange, before: RankMemory | None, after: RankMemory | None) -> int | None:
    """Memory of the policy's torch for a setting of the policy. Otherwise memory of the device: the part that the
    engine or a foreign process has released since the policy failed, or the free memory if the engine failed."""
    if before is None or after is None:
        return None
    failed_request_bytes = change.diagnosis.numbers.get("requested_bytes", 0)
    if not after.device_total_bytes:
        # The peak of a process never falls: only another process can show less.
        return None if change.level == "Live" else before.peak_rss_bytes - after.peak_rss_bytes
    if change.remedy.setting in _OF_THE_POLICY:
        if change.role == "policy":
            return _peak_reserved_bytes(before) + failed_request_bytes - _peak_reserved_bytes(after)
        cached = change.diagnosis.numbers.get("policy_cache_bytes")
        return None if cached is None else cached - (after.reserved_bytes - after.allocated_bytes)
    if change.role == "policy":
        return _bytes_without_others(after) - _bytes_without_others(before)
    return after.device_free_bytes - before.device_free_bytes + failed_request_bytes


def _bytes_without_others(memory: RankMemory) -> int:
    return memory.device_free_bytes + memory.reserved_bytes


def _peak_reserved_bytes(memory: RankMemory) -> int:
    return max(memory.peak_reserved_bytes, memory.reserved_bytes)
