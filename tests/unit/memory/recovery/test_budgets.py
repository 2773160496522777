"""Budgets of changes and restarts, and the rule by which progress restores them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.plan_change import PlanChange
from rljob_memory.recovery import (
    Constraints,
    FailureReport,
    GiveUp,
    GiveUpReason,
    RecoveryState,
    Restart,
    respond,
)
from tests.unit.memory.recovery.failures import (
    FIRST_PLAN,
    IN_THE_OPERATOR,
    IN_THE_TRAINER,
    NOON,
    ON_ONE_MACHINE,
    change_after,
    constraints,
    diagnosis,
    failure,
)

LOST = FailureReport("policy-0 died while updating", 1, NOON)
RAISED = FailureReport("policy-0 failed while updating: ValueError: no", 1, NOON, is_repeatable=True)
PROGRESS = [
    (4, 100, 2),  # the step that failed is not committed yet
    (13, 100, 2),
    (14, 100, 1),  # ten steps, from the 5th
    (94, 100, 1),  # ninety steps give back one as well
    (6, 8, 1),  # half of the four that remained
    (5, 8, 2),
]


def changed_at(step: int, *, preventive: bool = False) -> PlanChange:
    evidence = failure(diagnosis("ActivationSpike"), step=step)
    change = change_after(evidence, FIRST_PLAN, constraints()).change
    return change.model_copy(update={"preventive": preventive})


def after(state: RecoveryState, change: PlanChange, committed_step: int = 0) -> RecoveryState:
    return replace(state, committed_step=committed_step).with_change(change, FIRST_PLAN)


@pytest.mark.parametrize(("committed_step", "steps", "left"), PROGRESS)
def test_progress_gives_one_adjustment_back(committed_step: int, steps: int, left: int) -> None:
    state = RecoveryState(FIRST_PLAN, steps, (changed_at(5),), adjustments=2, committed_step=committed_step)
    assert state.effective_adjustments == left


@pytest.mark.parametrize(("committed_step", "steps", "left"), PROGRESS)
def test_progress_gives_one_restart_back_by_the_same_rule(committed_step: int, steps: int, left: int) -> None:
    state = RecoveryState(FIRST_PLAN, steps, restarts=2, first_step=5, committed_step=committed_step)
    assert state.effective_restarts == left


def test_the_next_change_stores_the_restored_budget() -> None:
    state = after(after(RecoveryState(FIRST_PLAN, 100), changed_at(5)), changed_at(5), committed_step=4)
    assert state.adjustments == 2
    state = after(state, changed_at(21), committed_step=20)
    assert state.adjustments == 2
    assert len(state.changes) == 3


def test_changes_of_attempts_before_a_resumption_are_no_loop() -> None:
    state = RecoveryState(FIRST_PLAN, 100)
    for _ in range(3):
        state = after(state, changed_at(5), committed_step=4)
    assert state.changes_since_progress == 3
    attempt = state.changes[-1].attempt
    assert replace(state, first_attempt=attempt + 1).changes_since_progress == 0


def test_a_change_before_a_failure_costs_nothing() -> None:
    state = after(RecoveryState(FIRST_PLAN, 100), changed_at(5))
    state = after(state, changed_at(15, preventive=True), committed_step=14)
    assert state.adjustments == 1
    assert state.effective_adjustments == 0, "progress counts from the last failure"


def test_changes_without_a_stored_count_are_counted_one_by_one() -> None:
    changes = [changed_at(5), changed_at(5), changed_at(30), changed_at(31)]
    state = RecoveryState.replayed(FIRST_PLAN, changes, committed_step=35, steps=100)
    assert state.adjustments == 3
    assert state.changes == tuple(changes)
    assert state.committed_step == 35


# --- restarts ---


@pytest.mark.parametrize("given", [constraints(IN_THE_OPERATOR), constraints(ON_ONE_MACHINE)])
def test_a_lost_process_restarts_as_often_as_the_manifest_allows(given: Constraints) -> None:
    state = RecoveryState(None, steps=100)
    for count in (1, 2, 3):
        answer = respond(LOST, state, given)
        assert isinstance(answer, Restart)
        assert answer.message == f"policy-0 died while updating (restart {count} of 3)"
        state = answer.state
    end = respond(replace(LOST, earlier_failures=("1: WorkerLost",)), state, given)
    assert isinstance(end, GiveUp)
    assert end.reason == "RestartsExhausted"
    assert "recovery.maxRestarts is 3; earlier attempts: 1: WorkerLost" in end.explanation


def test_the_same_error_twice_without_a_step_is_given_up() -> None:
    given = constraints(ON_ONE_MACHINE)
    first = respond(RAISED, RecoveryState(None, 100, first_step=1, committed_step=1), given)
    assert isinstance(first, Restart)
    second = respond(RAISED, replace(first.state, first_step=2), given)
    assert isinstance(second, Restart), "the first of the two had committed a step"
    end = respond(RAISED, second.state, given)
    assert isinstance(end, GiveUp)
    assert end.reason == "NoProgress"


def test_a_final_failure_is_given_up_at_once() -> None:
    final = replace(RAISED, final=GiveUpReason.BAD_INPUT)
    end = respond(final, RecoveryState(None, 100), constraints(IN_THE_OPERATOR))
    assert end == GiveUp(GiveUpReason.BAD_INPUT, RAISED.message)


def test_a_supervised_caller_leaves_every_restart_to_its_supervisor() -> None:
    end = respond(LOST, RecoveryState(None, 100), constraints(IN_THE_TRAINER))
    assert isinstance(end, GiveUp)
    assert end.reason == "LeftToSupervisor"


def test_new_pods_are_tried_if_no_change_of_the_plan_is_left() -> None:
    """Memory also runs out for causes outside the job. On the same machine the same plan would fail again."""
    killed = failure(diagnosis("HostMemory"), message="policy-0 was killed")
    report = FailureReport("policy-0 was killed", 1, NOON, killed)
    state = RecoveryState(FIRST_PLAN, 100)
    restart = respond(report, state, constraints(IN_THE_OPERATOR, host_memory_limit_bytes=8 << 30))
    assert isinstance(restart, Restart)
    assert "recovery.maxHostMemory is absent" in restart.cause
    end = respond(report, state, constraints(ON_ONE_MACHINE))
    assert isinstance(end, GiveUp)
    assert end.reason == "NothingLeft"


@pytest.mark.parametrize("mode", ["Auto", "Disabled"])
def test_a_job_with_a_fixed_plan_restarts_with_advice(mode: str) -> None:
    killed = failure(diagnosis("HostMemory"), message="policy-0 was killed")
    report = FailureReport("policy-0 was killed", 1, NOON, killed, advice="raise its memory limit")
    state = RecoveryState(FIRST_PLAN if mode == "Disabled" else None, 100)
    answer = respond(report, state, constraints(IN_THE_OPERATOR, memory={"mode": mode}))
    assert isinstance(answer, Restart)
    assert "aise its memory limit" in answer.cause
    assert answer.state.plan == state.plan
