"""A job on one H200 with Qwen3-0.6B's shape, what fails in it, and a run of failures against the ladder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_args

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.memory_settings import MemorySettings
from rljob_api.plan_change import DiagnosisStatus, Phase, PlanChange, RemedyLevel, Role
from rljob_api.recovery import RecoverySpec
from rljob_api.step_report import Evidence, RankMemory
from rljob_memory.estimate import GIB
from rljob_memory.plan import Hardware, ModelShape, Workload, first_plan
from rljob_memory.recovery import GiveUp, History, Latitude, Remedy, decide, facts_of, with_change

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
EVERY_LEVEL: frozenset[RemedyLevel] = frozenset(get_args(RemedyLevel))
IN_THE_TRAINER: frozenset[RemedyLevel] = frozenset({"Live", "RespawnRole"})
ON_ONE_MACHINE: frozenset[RemedyLevel] = frozenset({"Live", "RespawnRole", "RestartInPlace"})
IN_THE_OPERATOR: frozenset[RemedyLevel] = frozenset({"RestartInPlace", "ReplacePods"})

H200 = Hardware("cuda", 140 * GIB, 128 * GIB, "2.11.0")
QWEN3_0_6B = ModelShape(
    596_000_000, layers=28, hidden=1024, kv_heads=8, head_dim=128, vocabulary=151_936, bytes_per_parameter=2
)
SIXTEEN_GROUPS = Workload(16, 8, max_prompt_tokens=100, max_response_tokens=512)

FACTS = facts_of(H200, QWEN3_0_6B, SIXTEEN_GROUPS, fused=True, shared_memory_bytes=8 * GIB)
FOUR_RANKS = FACTS.model_copy(update={"policy_ranks": 4})
ON_A_CPU = FACTS.model_copy(update={"device_total_bytes": 0})
FIRST_PLAN = first_plan(MemorySettings(), H200, QWEN3_0_6B, SIXTEEN_GROUPS)
ALL_OFF = FIRST_PLAN.model_copy(
    update={
        "empty_cache": False,
        "expandable_segments": False,
        "rollout_sleep_level": 0,
        "detach_metrics": False,
        "kv_cache_bytes": 40 * GIB,
    }
)
NOTHING_YET = History()


def diagnosis(failure_class: str, confidence: float = 0.8, **numbers: int) -> DiagnosisStatus:
    return DiagnosisStatus(
        class_name=failure_class, confidence=confidence, message=f"It was {failure_class}.", numbers=numbers
    )


def failure(
    *diagnoses: DiagnosisStatus,
    role: Role = "policy",
    phase: Phase | None = "update",
    step: int = 3,
    message: str = "",
    memory: RankMemory | None = None,
) -> Evidence:
    return Evidence(
        time=NOON,
        attempt=1,
        role=role,
        rank=0,
        step=step,
        phase=phase,
        message=message,
        memory=memory,
        diagnoses=list(diagnoses),
    )


def latitude(
    levels: frozenset[RemedyLevel] = EVERY_LEVEL,
    *,
    facts: MemoryProfile | None = FACTS,
    memory: dict[str, Any] | None = None,
    recovery: dict[str, Any] | None = None,
    **more: Any,
) -> Latitude:
    settings = MemorySettings.model_validate(memory or {})
    return Latitude(settings, RecoverySpec.model_validate(recovery or {}), facts, levels, **more)


def change_of(evidence: Evidence, remedy: Remedy, **more: Any) -> PlanChange:
    return PlanChange(
        generation=remedy.plan.generation,
        time=NOON,
        attempt=evidence.attempt,
        step=evidence.step,
        phase=evidence.phase,
        role=evidence.role,
        rank=evidence.rank,
        diagnosis=remedy.diagnosis,
        remedy=remedy.status,
        level=remedy.level,
        **more,
    )


def remedies_of(
    evidences: Iterable[Evidence], plan: MemoryPlan, given: Latitude, *, committed_each_time: int = 0
) -> tuple[list[Remedy], GiveUp | None]:
    """What is decided as one failure follows the other, until it is given up or they end."""
    history, remedies = NOTHING_YET, list[Remedy]()
    for evidence in evidences:
        decision = decide(evidence, plan, history, given)
        if isinstance(decision, GiveUp):
            return remedies, decision
        remedies.append(decision)
        history = with_change(history, change_of(evidence, decision), steps=1_000)
        history = replace(history, committed_step=history.committed_step + committed_each_time)
        plan = decision.plan
    return remedies, None


def settings_in_order(remedies: list[Remedy]) -> list[str]:
    """The settings that were changed, each as often as in a row, once."""
    names = [remedy.status.setting for remedy in remedies]
    return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


def the_remedy(decision: Remedy | GiveUp) -> Remedy:
    """A decision that has to be a remedy."""
    assert isinstance(decision, Remedy), decision
    return decision


FRAGMENTED = diagnosis(
    "Fragmentation", requested_bytes=2 * GIB, free_bytes=GIB // 2, reserved_but_unallocated_bytes=6 * GIB
)
