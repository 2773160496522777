"""Budgets of changes and restarts, and the rule by which progress restores them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_memory.recovery import (
    Constraints,
    FailureReport,
    GiveUp,
    GiveUpReason,
    RecoveryState,
    Response,
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
KILLED = FailureReport("policy-0 was killed", 1, NOON, failure(diagnosis("HostMemory"), message="policy-0 was killed"))


def changed_at(step: int, *, preventive: bool = False) -> PlanChange:
    evidence = failure(diagnosis("ActivationSpike"), step=step)
    change = change_after(evidence, FIRST_PLAN, constraints()).change
    return change.model_copy(update={"preventive": preventive})


def after(state: RecoveryState, change: PlanChange, committed_step: int = 0) -> RecoveryState:
    return replace(state, committed_step=committed_step).with_change(change, FIRST_PLAN)


def given_up(response: Response, reason: str) -> GiveUp:
    assert isinstance(response, GiveUp)
    assert response.reason == reason
    return response


def restarted(response: Response) -> Restart:
    assert isinstance(response, Restart)
    return response


@pytest.mark.parametrize(
    ("committed_step", "steps", "left"),
    [
        (4, 100, 2),  # the step that failed is not committed yet
        (13, 100, 2),
        (14, 100, 1),  # ten steps, from the 5th
        (94, 100, 1),  # ninety steps give back one as well
        (6, 8, 1),  # half of the four that remained
        (5, 8, 2),
    ],
)
def test_progress_gives_one_adjustment_and_one_restart_back(committed_step: int, steps: int, left: int) -> None:
    state = RecoveryState(FIRST_PLAN, steps, (changed_at(5),), adjustments=2, committed_step=committed_step)
    assert state.effective_adjustments == left
    state = RecoveryState(FIRST_PLAN, steps, restarts=2, first_step=5, committed_step=committed_step)
    assert state.effective_restarts == left


def test_the_next_change_stores_the_restored_budget() -> None:
    state = after(after(RecoveryState(FIRST_PLAN, 100), changed_at(5)), changed_at(5), committed_step=4)
    assert state.adjustments == 2
    state = after(state, changed_at(21), committed_step=20)
    assert state.adjustments == 2
    assert len(state.changes) == 3


def test_changes_before_a_resumption_do_not_count_as_a_loop() -> None:
    state = RecoveryState(FIRST_PLAN, 100)
    for _ in range(3):
        state = after(state, changed_at(5), committed_step=4)
    assert state.changes_since_progress == 3
    assert replace(state, first_attempt=state.changes[-1].attempt + 1).changes_since_progress == 0


def test_a_change_before_a_failure_costs_nothing() -> None:
    state = after(RecoveryState(FIRST_PLAN, 100), changed_at(5))
    state = after(state, changed_at(15, preventive=True), committed_step=14)
    assert state.adjustments == 1
    assert state.effective_adjustments == 0, "progress counts from the last failure"


def test_changes_without_a_stored_count_are_counted_one_by_one() -> None:
    changes = [changed_at(5), changed_at(5), changed_at(30), changed_at(31)]
    state = RecoveryState.replayed(FIRST_PLAN, changes, committed_step=35, steps=100)
    assert (state.adjustments, state.changes, state.committed_step) == (3, tuple(changes), 35)


# --- restarts ---


@pytest.mark.parametrize("given", [constraints(IN_THE_OPERATOR), constraints(ON_ONE_MACHINE)])
def test_a_lost_process_restarts_as_often_as_the_manifest_allows(given: Constraints) -> None:
    state = RecoveryState(None, steps=100)
    for count in (1, 2, 3):
        restart = restarted(respond(LOST, state, given))
        assert restart.message == f"policy-0 died while updating (restart {count} of 3)"
        state = restart.state
    end = given_up(respond(replace(LOST, earlier_failures=("1: WorkerLost",)), state, given), "RestartsExhausted")
    assert "recovery.maxRestarts is 3; earlier attempts: 1: WorkerLost" in end.explanation


def test_the_same_error_twice_without_a_step_is_given_up() -> None:
    given = constraints(ON_ONE_MACHINE)
    first = restarted(respond(RAISED, RecoveryState(None, 100, first_step=1, committed_step=1), given))
    second = restarted(respond(RAISED, replace(first.state, first_step=2), given))  # the first committed a step
    given_up(respond(RAISED, second.state, given), "NoProgress")


def test_a_final_failure_is_given_up_at_once() -> None:
    final = replace(RAISED, final=GiveUpReason.BAD_INPUT)
    end = respond(final, RecoveryState(None, 100), constraints(IN_THE_OPERATOR))
    assert end == GiveUp(GiveUpReason.BAD_INPUT, RAISED.message)


def test_a_supervised_caller_leaves_every_restart_to_its_supervisor() -> None:
    given_up(respond(LOST, RecoveryState(None, 100), constraints(IN_THE_TRAINER)), "LeftToSupervisor")


def test_new_pods_are_tried_if_no_change_of_the_plan_is_left() -> None:
    """Memory also runs out for causes outside the job. On the same machine the same plan would fail again."""
    state = RecoveryState(FIRST_PLAN, 100)
    pods = constraints(IN_THE_OPERATOR, host_memory_limit_bytes=8 << 30)
    assert "recovery.maxHostMemory is absent" in restarted(respond(KILLED, state, pods)).cause
    given_up(respond(KILLED, state, constraints(ON_ONE_MACHINE)), "NothingLeft")


@pytest.mark.parametrize(("mode", "plan"), [("Auto", None), ("Disabled", FIRST_PLAN)])
def test_a_job_with_a_fixed_plan_restarts_with_advice(mode: str, plan: MemoryPlan | None) -> None:
    report = replace(KILLED, advice="raise its memory limit")
    given = constraints(IN_THE_OPERATOR, memory={"mode": mode})
    restart = restarted(respond(report, RecoveryState(plan, 100), given))
    assert "aise its memory limit" in restart.cause
    assert restart.state.plan == plan


# --- a process that was lost while its peers work on ---

ENGINE = FailureReport("rollout-1 died while generating", 1, NOON, dead=frozenset({"rollout"}), peers_work_on=True)
TRAINER = constraints(IN_THE_TRAINER)


def test_a_lost_engine_is_replaced_and_counts_as_a_restart() -> None:
    restart = restarted(respond(ENGINE, RecoveryState(FIRST_PLAN, steps=20), TRAINER))
    assert (restart.of_one_process, restart.state.restarts, restart.state.plan) == (True, 1, FIRST_PLAN)
    assert restart.message == "rollout-1 died while generating (restart 1 of 3)"


@pytest.mark.parametrize(("peers_work_on", "restarts"), [(True, 3), (False, 0)])
def test_a_loss_is_left_to_the_supervisor_otherwise(peers_work_on: bool, restarts: int) -> None:
    state = RecoveryState(FIRST_PLAN, steps=20, restarts=restarts)
    given_up(respond(replace(ENGINE, peers_work_on=peers_work_on), state, TRAINER), "LeftToSupervisor")


def test_restarts_run_out_however_many_steps_came_before() -> None:
    """Steps before a replacement give its restart back once; those after it count for the next one."""
    state = RecoveryState(FIRST_PLAN, steps=1_000, committed_step=500, restarts=2)
    for number in (2, 3):
        restart = restarted(respond(ENGINE, state, TRAINER))
        assert restart.message.endswith(f"(restart {number} of 3)")
        state = restart.state
    given_up(respond(ENGINE, state, TRAINER), "LeftToSupervisor")
    restarted(respond(ENGINE, replace(state, committed_step=510), TRAINER))  # ten steps later
