"""All families of remedies, by the resource that they free, and the measured effect of a change."""

from __future__ import annotations

from rljob_api.plan_change import PlanChange, Role
from rljob_api.step_report import RankMemory
from rljob_memory.recovery.families.engine_gpu_memory import KV_CACHE, ROLLOUT_SLEEP, SYNC_BUCKET, WEIGHT_EXPORT
from rljob_memory.recovery.families.host_memory import CONTROLLER_HOST_MEMORY, HOST_MEMORY, SHARED_MEMORY
from rljob_memory.recovery.families.policy_gpu_memory import (
    ACTIVATION_CHECKPOINTING,
    DETACH_METRICS,
    EMPTY_CACHE,
    EXPANDABLE_SEGMENTS,
    LOGPROB_CHUNK,
    MICRO_BATCH,
    OPTIMIZER_OFFLOAD,
    POLICY_OFFLOAD,
)
from rljob_memory.recovery.families.processes_and_gpus import (
    EXCLUDED_NODES,
    FRESH_ENGINES,
    FRESH_POLICY,
    FRESH_PROCESSES,
    POLICY_GPUS,
)
from rljob_memory.recovery.family import Family

FAMILIES: tuple[Family, ...] = (
    DETACH_METRICS,
    EMPTY_CACHE,
    EXPANDABLE_SEGMENTS,
    LOGPROB_CHUNK,
    SYNC_BUCKET,
    MICRO_BATCH,
    ROLLOUT_SLEEP,
    WEIGHT_EXPORT,
    KV_CACHE,
    ACTIVATION_CHECKPOINTING,
    POLICY_OFFLOAD,
    OPTIMIZER_OFFLOAD,
    FRESH_ENGINES,
    FRESH_POLICY,
    FRESH_PROCESSES,
    HOST_MEMORY,
    CONTROLLER_HOST_MEMORY,
    SHARED_MEMORY,
    EXCLUDED_NODES,
    POLICY_GPUS,
)
"""In the order of their price: free changes, those that cost a little time per step, those that cost much, and those
that cost the cluster resources. Within the trainer the order follows docs/mitigations.md."""

CHANGEABLE_SETTINGS = frozenset(family.name for family in FAMILIES)
"""Names of the settings in all changes that can be made."""


# The measured effect of a change of the plan, once the failed phase has succeeded.

_MORE_ROOM = frozenset(family.name for family in (HOST_MEMORY, CONTROLLER_HOST_MEMORY, SHARED_MEMORY))
_OF_THE_POLICY = frozenset(family.name for family in FAMILIES if family.owner == "policy") - {POLICY_OFFLOAD.name}
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
