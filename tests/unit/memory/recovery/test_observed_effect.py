"""The measured effect of a change, from memory before and after."""

from __future__ import annotations

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, PlanChange, Role
from rljob_api.step_report import RankMemory
from rljob_memory.recovery import observed, role_that_shows
from rljob_memory.sizes import GIB
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    FIRST_PLAN,
    change_after,
    constraints,
    diagnosis,
    failure,
)


def a_change(
    failure_class: str, role: Role = "policy", plan: MemoryPlan = ALL_OFF, phase: Phase = "update", **more: int
) -> PlanChange:
    given = constraints(host_memory_limit_bytes=4 * GIB, recovery={"maxHostMemory": "64Gi"})
    evidence = failure(diagnosis(failure_class, **more), role=role, phase=phase)
    return change_after(evidence, plan, given).change


def memory(role: Role = "policy", *, reserved: int = 0, free: int = 0, total: int = 140, rss: int = 0) -> RankMemory:
    return RankMemory(
        role=role,
        rank=0,
        reserved_bytes=reserved * GIB,
        peak_reserved_bytes=reserved * GIB,
        device_free_bytes=free * GIB,
        device_total_bytes=total * GIB,
        peak_rss_bytes=rss * GIB,
    )


def test_a_failed_request_counts_as_needed() -> None:
    change = a_change("Fragmentation", requested_bytes=2 * GIB, reserved_but_unallocated_bytes=6 * GIB)
    proven = observed(change, memory(reserved=50), memory(reserved=46))
    assert proven.remedy.observed_bytes == 6 * GIB
    assert proven.model_copy(update={"remedy": change.remedy}) == change, "nothing else changes"


def test_more_memory_in_use_is_a_negative_effect() -> None:
    assert (
        observed(a_change("Fragmentation"), memory(reserved=40), memory(reserved=43)).remedy.observed_bytes == -3 * GIB
    )


def test_the_effect_of_a_smaller_engine_shows_on_the_device() -> None:
    change = a_change("KVCacheOversized", role="rollout", plan=FIRST_PLAN)
    assert (change.remedy.setting, role_that_shows(change)) == ("kvCache", "rollout")
    before, after = memory("rollout", reserved=60, free=1), memory("rollout", reserved=60, free=11)
    assert observed(change, before, after).remedy.observed_bytes == 10 * GIB


def test_the_engines_effect_ignores_the_memory_of_the_policy() -> None:
    """The policy failed with 30 GiB. The sample afterwards was taken after its update, with 3 GiB."""
    change = a_change("EngineNotAsleep", requested_bytes=9 * GIB)
    assert change.remedy.setting == "rolloutSleep"
    before, after = memory(reserved=30, free=5), memory(reserved=3, free=134)
    assert observed(change, before, after).remedy.observed_bytes == 102 * GIB


def test_the_policys_cache_is_compared_before_and_after() -> None:
    change = a_change("AllocatorCache", role="rollout", phase="sync", policy_cache_bytes=90 * GIB)
    assert (change.remedy.setting, role_that_shows(change)) == ("emptyCache", "policy")
    policy = memory(reserved=4).model_copy(update={"allocated_bytes": 3 * GIB})
    assert observed(change, memory("rollout", free=140), policy).remedy.observed_bytes == 89 * GIB
    unknown = a_change("AllocatorCache", role="rollout", phase="sync")
    assert observed(unknown, memory("rollout", free=140), policy).remedy.observed_bytes is None


def test_the_effect_of_a_raised_limit_is_the_difference() -> None:
    assert observed(a_change("HostMemory"), None, None).remedy.observed_bytes == 2 * GIB


def test_without_both_samples_no_effect_is_reported() -> None:
    assert observed(a_change("Fragmentation"), None, memory(reserved=3)).remedy.observed_bytes is None
    assert observed(a_change("Fragmentation"), memory(reserved=3), None).remedy.observed_bytes is None


def test_on_a_cpu_only_a_new_process_can_show_less() -> None:
    change, before, after = a_change("ActivationSpike"), memory(total=0, rss=9), memory(total=0, rss=4)
    assert change.level == "Live"
    assert observed(change, before, before).remedy.observed_bytes is None
    respawned = change.model_copy(update={"level": "RespawnRole"})
    assert observed(respawned, before, after).remedy.observed_bytes == 5 * GIB
