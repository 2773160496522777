"""A process that was lost while its peers work on."""

from __future__ import annotations

from dataclasses import replace

from rljob_memory.recovery import FailureReport, GiveUp, GiveUpReason, RecoveryState, Restart, respond
from tests.unit.memory.recovery.failures import FIRST_PLAN, IN_THE_TRAINER, NOON, constraints

LOST = FailureReport("rollout-1 died while generating", 1, NOON, dead=frozenset({"rollout"}), peers_work_on=True)
STATE = RecoveryState(FIRST_PLAN, steps=20)


def test_it_is_replaced_and_counts_as_a_restart() -> None:
    answer = respond(LOST, STATE, constraints(levels=IN_THE_TRAINER))
    assert isinstance(answer, Restart)
    assert answer.of_one_process
    assert answer.state.restarts == 1
    assert answer.state.plan == FIRST_PLAN
    assert answer.message == "rollout-1 died while generating (restart 1 of 3)"


def test_without_restarts_it_is_left_to_the_supervisor() -> None:
    answer = respond(LOST, replace(STATE, restarts=3), constraints(levels=IN_THE_TRAINER))
    assert isinstance(answer, GiveUp)
    assert answer.reason is GiveUpReason.LEFT_TO_SUPERVISOR


def test_restarts_run_out_however_many_steps_came_before() -> None:
    """Steps before a replacement give its restart back once; those after it count for the next one."""
    state = replace(STATE, steps=1_000, committed_step=500, restarts=2)
    messages = list[str]()
    while isinstance(answer := respond(LOST, state, constraints(levels=IN_THE_TRAINER)), Restart):
        messages.append(answer.message.partition(" (")[2])
        assert len(messages) < 9, "it never ends"
        state = answer.state
    assert messages == ["restart 2 of 3)", "restart 3 of 3)"]
    state = replace(state, committed_step=510)
    assert isinstance(respond(LOST, state, constraints(levels=IN_THE_TRAINER)), Restart), "ten steps later"


def test_a_loss_that_its_peers_notice_is_not_answered_by_a_replacement() -> None:
    answer = respond(replace(LOST, peers_work_on=False), STATE, constraints(levels=IN_THE_TRAINER))
    assert isinstance(answer, GiveUp)
