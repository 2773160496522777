"""Remedies of reported messages and recorded failures, changes after warnings, and the page that lists them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path, PurePath

import pytest

from rljob_api.conditions import ConditionReason
from rljob_api.memory_failure import DeviceMemory, FailureKind, MemoryFailure
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, RemedyLevel, Role
from rljob_api.step_report import Evidence, MemoryPressure
from rljob_memory.budget import Setup
from rljob_memory.diagnosis import FailureClass, diagnose, diagnosed, diagnosis_statuses
from rljob_memory.evidence import evidence_of_run
from rljob_memory.recovery import Changed, Constraints, GiveUpReason, RecoveryState, prevent
from rljob_memory.recovery.remedies import REMEDIES, Remedy, remedies_for
from rljob_memory.sizes import GIB, MIB
from rljob_memory.trend import RECYCLE_STEPS
from tests.unit.memory.diagnosis.recorded import recorded_evidence, recorded_failures, torch_message
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    FIRST_PLAN,
    FOUR_RANKS,
    IN_THE_OPERATOR,
    IN_THE_TRAINER,
    NOON,
    SETUP,
    change_after,
    constraints,
    diagnosis,
    failure,
)

FRAGMENTED = torch_message(2.4, total=139.81, free=0.5, process=139, allocated=120, cached=18.1)


def test_a_reported_message_is_diagnosed_with_its_numbers() -> None:
    cause = diagnosed(failure(message=FRAGMENTED)).diagnoses[0]
    assert cause.class_name == "Fragmentation"
    assert cause.numbers["reserved_but_unallocated_bytes"] == round(18.1 * GIB)
    assert "step 3" in cause.message
    known = failure(diagnosis("RetainedGraph"), message=FRAGMENTED)
    assert diagnosed(known) is known


@pytest.mark.parametrize(
    ("message", "phase", "cause"),
    [
        ("something went wrong", "update", "Unknown"),
        ("OOMKilled", None, "HostMemory"),
        (
            torch_message(37.1, total=139.8, free=1.7, process=138, allocated=99, cached=0.9),
            "update",
            "ActivationSpike",
        ),
        (torch_message(37.1, total=139.8, free=1.7, process=138, allocated=99, cached=0.9), None, "ActivationSpike"),
    ],
)
def test_there_is_always_a_cause_to_act_on(message: str, phase: Phase | None, cause: str) -> None:
    reported = Evidence(time=datetime.now(UTC), attempt=1, role="policy", rank=0, step=1, phase=phase, message=message)
    assert diagnosed(reported).diagnoses[0].class_name == cause


def test_the_plan_shows_that_the_engine_stays_awake() -> None:
    full = torch_message(2.4, total=139.81, free=0.5, process=79, allocated=70, cached=0.2)
    awake = FIRST_PLAN.model_copy(update={"rollout_sleep": "Disabled"})
    assert diagnosed(failure(message=full), awake).diagnoses[0].class_name == "EngineNotAsleep"


@pytest.mark.parametrize(("topology", "expected"), [("Colocated", "EngineNotAsleep"), ("Disaggregated", "Foreign")])
def test_memory_of_others_on_the_policys_gpu_is_no_engine(tmp_path: Path, topology: str, expected: str) -> None:
    (tmp_path / "ledger.jsonl").write_text(json.dumps({"kind": "attempt", "plan_facts": {"topology": topology}}) + "\n")
    device = DeviceMemory(
        total_bytes=140 * GIB, free_bytes=GIB, process_bytes=40 * GIB, allocated_bytes=38 * GIB, requested_bytes=2 * GIB
    )
    out = MemoryFailure(kind=FailureKind.ALLOCATOR, device=device, role="policy", phase="update")
    found = diagnose(evidence_of_run(out, tmp_path, ALL_OFF))
    assert found[0].failure_class.startswith(expected)


@pytest.mark.parametrize(("cause", "path"), recorded_failures(), ids=lambda value: getattr(value, "stem", str(value)))
def test_every_recorded_failure_has_a_remedy_of_its_class(cause: FailureClass, path: PurePath) -> None:
    role: Role = "rollout" if cause in (FailureClass.KV_CACHE_OVERSIZED, FailureClass.ALLOCATOR_CACHE) else "policy"
    phase: Phase = "sync" if cause is FailureClass.WEIGHT_SYNC_SPIKE else "update"
    evidence = failure(*diagnosis_statuses(diagnose(recorded_evidence(path))), role=role, phase=phase)
    given = constraints(IN_THE_OPERATOR, host_memory_limit_bytes=8 * GIB, recovery={"maxHostMemory": "64Gi"})
    plan = ALL_OFF.model_copy(update={"shared_memory_bytes": 64 * MIB})
    acting = remedies_for(cause) or remedies_for(FailureClass.UNKNOWN)
    assert change_after(evidence, plan, given).change.remedy.setting in {remedy.name for remedy in acting}


# --- changes before a failure ---


def prevented(
    failure_class: str,
    role: Role = "policy",
    plan: MemoryPlan = FIRST_PLAN,
    given: Constraints | None = None,
    growth: int = 0,
    steps_left: int = RECYCLE_STEPS,
) -> Changed | None:
    numbers = {"own_growth_bytes": growth} if growth else {}
    pressure = MemoryPressure(diagnosis=diagnosis(failure_class, **numbers), role=role, rank=0, steps_left=steps_left)
    state = RecoveryState(plan, steps=100)
    return prevent(pressure, state, given or constraints(IN_THE_TRAINER), attempt=1, step=4, time=NOON)


@pytest.mark.parametrize("setup", [SETUP, FOUR_RANKS])
def test_before_a_failure_every_rank_can_take_a_live_change(setup: Setup) -> None:
    remedy = prevented("RetainedGraph", plan=ALL_OFF, given=constraints(IN_THE_TRAINER, setup=setup))
    assert remedy is not None
    assert (remedy.change.remedy.setting, remedy.change.level, remedy.renew) == ("detachMetrics", "Live", frozenset())


@pytest.mark.parametrize("failure_class", ["EngineNotAsleep", "HostMemory"])
def test_an_engine_that_grows_is_replaced_before_a_failure(failure_class: str) -> None:
    remedy = prevented(failure_class, "rollout", growth=6 * GIB)
    assert remedy is not None
    assert (remedy.change.remedy.setting, remedy.change.level) == ("engineProcesses", "RespawnRole")
    assert remedy.change.remedy.expected_bytes == 6 * GIB
    assert remedy.renew == {"rollout"}
    assert remedy.state.adjustments == 0


@pytest.mark.parametrize("failure_class", ["RetainedGraph", "HostMemory"])
def test_a_policy_that_grows_is_replaced_in_the_last_steps(failure_class: str) -> None:
    remedy = prevented(failure_class, growth=6 * GIB)
    assert remedy is not None
    assert (remedy.change.remedy.setting, remedy.renew) == ("policyProcesses", frozenset({"policy"}))
    assert prevented(failure_class, growth=6 * GIB, steps_left=RECYCLE_STEPS + 1) is None, "it works for a few more"


def test_a_warning_leads_to_no_unrelated_change() -> None:
    assert prevented("HostMemory", "rollout") is None, "it is not the engine's own growth"
    assert prevented("HostMemory", "controller", growth=6 * GIB) is None
    assert prevented("RetainedGraph") is None, "its remedy is in force"
    assert prevented("HostMemory", given=constraints()) is None
    assert prevented("RetainedGraph", plan=ALL_OFF, given=constraints(memory={"mode": "Disabled"})) is None


# --- docs/recovery.md ---

PAGE = (Path(__file__).parents[4] / "docs" / "recovery.md").read_text(encoding="utf-8")
IN_FORCE_BY: dict[RemedyLevel, str] = {
    "Live": "the running processes",
    "RestartInPlace": "new containers in the same pods",
    "ReplacePods": "new pods",
}


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the table whose header begins with `heading`."""
    lines = PAGE.partition(f"| {heading} |")[2].splitlines()[2:]
    rows = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def in_force_by(remedy: Remedy) -> str:
    if remedy.level != "RespawnRole":
        return IN_FORCE_BY[remedy.level]
    return "new engines" if remedy.owner == "rollout" else "new policy processes"


def test_the_page_lists_every_class_setting_and_reason() -> None:
    acting = {cause: dict.fromkeys(f"`{remedy.name}`" for remedy in remedies_for(cause)) for cause in FailureClass}
    assert rows_under("class") == [[f"`{cause}`", ", ".join(names)] for cause, names in acting.items()]
    levels = {setting: by for setting, _, by in rows_under("setting")}
    assert levels == {f"`{remedy.name}`": in_force_by(remedy) for remedy in REMEDIES}
    documented = {reason.strip("`") for reason, _ in rows_under("reason")}
    of_pods = {GiveUpReason.BAD_INPUT, GiveUpReason.TRAINER_ERROR, GiveUpReason.POD_CANNOT_START}
    of_conditions = set(GiveUpReason) - {GiveUpReason.NOTHING_LEFT, GiveUpReason.LEFT_TO_SUPERVISOR}
    assert documented == of_conditions - of_pods - {GiveUpReason.DEADLINE_EXCEEDED}
    assert of_conditions <= set(ConditionReason)
