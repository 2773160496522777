"""A job on one H200 with the shape of Qwen3-0.6B, its failures and their answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_args

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_api.plan_change import DiagnosisStatus, Phase, RemedyLevel, Role
from rljob_api.recovery import RecoverySpec
from rljob_api.step_report import Evidence, RankMemory
from rljob_memory.budget import Setup
from rljob_memory.diagnosis import diagnosed
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.plan import first_plan
from rljob_memory.plan_settings import pinning_field
from rljob_memory.recovery import (
    Changed,
    Constraints,
    FailureReport,
    GiveUp,
    RecoveryState,
    Response,
    Restart,
    respond,
)
from rljob_memory.sizes import GIB
from rljob_memory.workload import Workload

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
EVERY_LEVEL: frozenset[RemedyLevel] = frozenset(get_args(RemedyLevel))
IN_THE_TRAINER: frozenset[RemedyLevel] = frozenset({"Live", "RespawnRole"})
ON_ONE_MACHINE: frozenset[RemedyLevel] = frozenset({"Live", "RespawnRole", "RestartInPlace"})
IN_THE_OPERATOR: frozenset[RemedyLevel] = frozenset({"RestartInPlace", "ReplacePods"})

H200 = Hardware("cuda", 140 * GIB, 128 * GIB, shared_memory_bytes=8 * GIB, layers_compiled=True)
QWEN3_0_6B = ModelShape(
    596_000_000, layers=28, hidden=1024, kv_heads=8, head_dim=128, vocabulary=151_936, bytes_per_parameter=2
)
SIXTEEN_GROUPS = Workload(16, 8, max_prompt_tokens=100, max_response_tokens=512)

SETUP = Setup(SIXTEEN_GROUPS, QWEN3_0_6B, H200)
FOUR_RANKS = SETUP.with_work(policy_ranks=4)
FIRST_PLAN = first_plan(MemorySettings(rollout_sleep="Level2"), SETUP)
ALL_OFF = FIRST_PLAN.model_copy(
    update={
        "empty_cache": False,
        "expandable_segments": False,
        "rollout_sleep": "Disabled",
        "detach_metrics": False,
        "kv_cache_bytes": 40 * GIB,
    }
)


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


def constraints(
    levels: frozenset[RemedyLevel] = EVERY_LEVEL,
    *,
    setup: Setup | None = SETUP,
    memory: dict[str, Any] | None = None,
    recovery: dict[str, Any] | None = None,
    **more: Any,
) -> Constraints:
    settings = MemorySettings.model_validate(memory or {})
    return Constraints(settings, RecoverySpec.model_validate(recovery or {}), setup, levels, **more)


def dead_after(evidence: Evidence, setup: Setup | None) -> frozenset[Role]:
    """Roles that the trainer would report as dead, if its policy was in the optimizer step at an OptimizerState."""
    several_ranks = setup is None or setup.work.policy_ranks > 1
    killed = {cause.class_name for cause in evidence.diagnoses} & {"HostMemory", "SharedMemory", "OptimizerState"}
    dead: set[Role] = set()
    if evidence.role != "policy" or killed:
        dead.add(evidence.role)
    if (evidence.role == "policy" and evidence.phase is None) or (
        several_ranks and (evidence.role == "policy" or evidence.phase == "sync")
    ):
        dead.add("policy")
    return frozenset(dead)


def report_of(evidence: Evidence, setup: Setup | None = SETUP) -> FailureReport:
    dead = dead_after(evidence, setup)
    return FailureReport(evidence.message, evidence.attempt, NOON, evidence, dead)


def answer(evidence: Evidence, plan: MemoryPlan, given: Constraints, state: RecoveryState | None = None) -> Response:
    """The answer to a failure under `plan`, the first one of a job unless `state` has a history."""
    state = replace(state or RecoveryState(None, steps=1_000), plan=plan)
    return respond(report_of(diagnosed(evidence, plan), given.setup), state, given)


def change_after(evidence: Evidence, plan: MemoryPlan, given: Constraints) -> Changed:
    """The answer, which has to be a change."""
    found = answer(evidence, plan, given)
    assert isinstance(found, Changed), found
    return found


def answers_to(
    evidences: Iterable[Evidence], plan: MemoryPlan, given: Constraints, *, committed_each_time: int = 0
) -> tuple[list[Changed], Restart | GiveUp | None]:
    """The answers to one failure after the other, until no change is left or the failures end."""
    state, changes = RecoveryState(plan, steps=1_000), list[Changed]()
    for evidence in evidences:
        found = answer(evidence, plan, given, state)
        if not isinstance(found, Changed):
            return changes, found
        changes.append(found)
        state = replace(found.state, committed_step=found.state.committed_step + committed_each_time)
        plan = found.plan
    return changes, None


def explanation_of(end: Response | None) -> str:
    """The explanation of an answer that changes nothing."""
    assert isinstance(end, Restart | GiveUp), end
    return end.cause if isinstance(end, Restart) else end.explanation


def settings_in_order(changes: list[Changed]) -> list[str]:
    """The changed settings in order, without consecutive duplicates."""
    names = [each.change.remedy.setting for each in changes]
    return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


FRAGMENTED = diagnosis(
    "Fragmentation", requested_bytes=2 * GIB, free_bytes=GIB // 2, reserved_but_unallocated_bytes=6 * GIB
)


def growing_job(most: int | None = 4, *, prompts: int = 16, **more: Any) -> RLJobSpec:
    """A job whose policy may grow to `most` GPUs."""
    values = {
        "model": {"uri": "hf://org/name"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 100, "promptsPerStep": prompts},
        "recovery": {} if most is None else {"maxGpus": most},
    }
    return RLJobSpec.model_validate(values | more)


_PINNED_VALUES = {
    "empty_cache": "Enabled",
    "expandable_segments": "Disabled",
    "rollout_sleep": "Level1",
    "kv_cache_bytes": "2Gi",
    "micro_batch_tokens": 4_096,
    "logprob_chunk_tokens": 512,
    "activation_checkpointing": "Disabled",
    "optimizer_offload": "Disabled",
    "sync_bucket_bytes": "256Mi",
    "detach_metrics": "Disabled",
    "weight_export": "SwitchSegments",
}
PINNABLE = frozenset(_PINNED_VALUES)
"""Settings of the plan that a manifest can pin."""


def settings_that_pin(pinned: Iterable[str]) -> MemorySettings:
    """`spec.memory` with these settings of the plan pinned to any value."""
    return MemorySettings.model_validate({pinning_field(name): _PINNED_VALUES[name] for name in pinned})
