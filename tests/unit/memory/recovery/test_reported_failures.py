"""Remedies of reported messages and recorded failures, and changes after warnings."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.plan_change import Phase, Role
from rljob_api.step_report import MemoryPressure, RankMemory
from rljob_memory.diagnosis import FailureClass, diagnose, diagnosed, diagnosis_statuses
from rljob_memory.recovery import Changed, Constraints, RecoveryState, prevent
from rljob_memory.recovery.ladder import families_for
from rljob_memory.sizes import GIB, MIB
from tests.unit.memory.diagnosis.recorded import recorded_evidence, recorded_failures
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    FACTS,
    FIRST_PLAN,
    FOUR_RANKS,
    IN_THE_OPERATOR,
    IN_THE_TRAINER,
    NOON,
    answer,
    answers_to,
    constraints,
    diagnosis,
    failure,
)

FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 2.40 GiB. GPU 0 has a total capacity of 139.81 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 139.00 GiB memory in use. Of the allocated memory 120.00 GiB "
    "is allocated by PyTorch, and 18.10 GiB is reserved by PyTorch but unallocated."
)


def test_a_reported_message_is_diagnosed_with_its_numbers() -> None:
    cause = diagnosed(failure(message=FRAGMENTED)).diagnoses[0]
    assert cause.class_name == "Fragmentation"
    assert cause.numbers["reserved_but_unallocated_bytes"] == round(18.1 * GIB)
    assert "step 3" in cause.message


def test_present_diagnoses_are_kept() -> None:
    evidence = failure(diagnosis("RetainedGraph"), message=FRAGMENTED)
    assert diagnosed(evidence) is evidence


def test_the_plan_shows_that_the_engine_stays_awake() -> None:
    full = FRAGMENTED.replace("this process has 139.00", "this process has 79.00").replace("120.00", "70.00")
    full = full.replace("18.10 GiB", "200.00 MiB")
    awake = FIRST_PLAN.model_copy(update={"rollout_sleep": "Disabled"})
    assert diagnosed(failure(message=full), awake).diagnoses[0].class_name == "EngineNotAsleep"


def test_there_is_always_a_cause_to_act_on() -> None:
    assert diagnosed(failure(message="something went wrong")).diagnoses[0].class_name == "Unknown"
    killed = diagnosed(failure(message="OOMKilled", phase=None)).diagnoses[0]
    assert killed.class_name == "HostMemory"


@pytest.mark.parametrize(("cause", "path"), recorded_failures(), ids=lambda value: getattr(value, "stem", str(value)))
def test_every_recorded_failure_has_a_remedy_of_its_class(cause: FailureClass, path: Path) -> None:
    found = recorded_evidence(path)
    assert found.failure is not None
    role: Role = "rollout" if cause in (FailureClass.KV_CACHE_OVERSIZED, FailureClass.ALLOCATOR_CACHE) else "policy"
    phase: Phase = "sync" if cause is FailureClass.WEIGHT_SYNC_SPIKE else "update"
    evidence = failure(*diagnosis_statuses(diagnose(found)), role=role, phase=phase)
    given = constraints(IN_THE_OPERATOR, host_memory_limit_bytes=8 * GIB, recovery={"maxHostMemory": "64Gi"})
    plan = ALL_OFF.model_copy(update={"shared_memory_bytes": 64 * MIB})
    decision = answer(evidence, plan, given)
    assert isinstance(decision, Changed)
    acting = families_for(cause) or families_for(FailureClass.UNKNOWN)
    assert decision.change.remedy.setting in {family.name for family in acting}


def pressure(failure_class: str, role: Role = "policy", **numbers: int) -> MemoryPressure:
    return MemoryPressure(diagnosis=diagnosis(failure_class, **numbers), role=role, rank=0, steps_left=7)


def prevented(pressure: MemoryPressure, plan: MemoryPlan, given: Constraints) -> Changed | None:
    return prevent(pressure, RecoveryState(plan, steps=100), given, attempt=1, step=4, time=NOON)


@pytest.mark.parametrize("profile", [FACTS, FOUR_RANKS])
def test_before_a_failure_every_rank_can_take_a_live_change(profile: MemoryProfile) -> None:
    given = constraints(IN_THE_TRAINER, profile=profile)
    remedy = prevented(pressure("RetainedGraph"), ALL_OFF, given)
    assert remedy is not None
    assert (remedy.change.remedy.setting, remedy.change.level, remedy.renew) == ("detachMetrics", "Live", frozenset())


@pytest.mark.parametrize("failure_class", ["EngineNotAsleep", "HostMemory"])
def test_an_engine_that_grows_is_replaced_before_a_failure(failure_class: str) -> None:
    grows = pressure(failure_class, "rollout", own_growth_bytes=6 * GIB)
    remedy = prevented(grows, FIRST_PLAN, constraints(IN_THE_TRAINER))
    assert remedy is not None
    assert (remedy.change.remedy.setting, remedy.change.level) == ("engineProcesses", "RespawnRole")
    assert remedy.change.remedy.expected_bytes == 6 * GIB
    assert remedy.renew == {"rollout"}
    assert remedy.state.adjustments == 0


def test_growth_that_is_not_the_engines_own_replaces_no_engine() -> None:
    assert prevented(pressure("HostMemory", "rollout"), FIRST_PLAN, constraints(IN_THE_TRAINER)) is None
    of_the_policy = pressure("HostMemory", own_growth_bytes=6 * GIB)
    assert prevented(of_the_policy, FIRST_PLAN, constraints(IN_THE_TRAINER)) is None


def test_an_engine_that_kept_memory_is_replaced_once_after_a_failure() -> None:
    kept = failure(diagnosis("EngineNotAsleep", requested_bytes=2 * GIB, other_processes_bytes=40 * GIB))
    remedies, _ = answers_to([kept, kept], FIRST_PLAN, constraints(IN_THE_TRAINER))
    assert [remedy.change.remedy.setting for remedy in remedies].count("engineProcesses") == 1
    assert remedies[0].change.remedy.setting == "engineProcesses"
    assert remedies[0].renew == {"rollout"}


def test_a_warning_leads_to_no_unrelated_change() -> None:
    assert prevented(pressure("RetainedGraph"), FIRST_PLAN, constraints(IN_THE_TRAINER)) is None
    assert prevented(pressure("HostMemory"), FIRST_PLAN, constraints()) is None
    disabled = constraints(memory={"mode": "Disabled"})
    assert prevented(pressure("RetainedGraph"), ALL_OFF, disabled) is None


def test_free_gpu_memory_decides_if_the_optimizer_returns() -> None:
    memory = RankMemory(role="policy", rank=0, device_free_bytes=90 * GIB, device_total_bytes=140 * GIB)
    offloaded = FIRST_PLAN.model_copy(update={"optimizer_offload": True})
    decision = answer(failure(message="OOMKilled", memory=memory), offloaded, constraints())
    assert isinstance(decision, Changed)
    assert decision.change.remedy.setting == "optimizerOffload"
