"""The plan at the start of an attempt, and its changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.plan_change import PlanChange
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import plan_change_records
from rljob_memory.recovery import Changed, RecoveryState
from rljob_trainer.recovery.plan_changes import PlanChanges, facts_of_plan, state_at_start
from tests.unit.ledger.samples import PLAN, step_record
from tests.unit.ledger.samples import plan_change as change
from tests.unit.ledger.samples import plan_change_record as record

FIRST = PLAN


def adopted(state: RecoveryState, change: PlanChange) -> Changed:
    """A change that leads to a plan of its generation."""
    plan = record(change.generation).plan
    return Changed(change, plan, state.with_change(change, plan), frozenset(), "")


class TestThePlanThatAnAttemptBeginsWith:
    def test_is_computed_if_there_is_none(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            assert state_at_start(ledger, 10).plan is None

    def test_is_the_given_one_if_nothing_was_changed_here(self, tmp_path: Path) -> None:
        given = FIRST.model_copy(update={"generation": 4})
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            assert state_at_start(ledger, 10, given).plan == given

    @pytest.mark.parametrize(("given", "expected"), [(2, 3), (3, 3), (5, 5)])
    def test_is_the_one_of_the_higher_generation(self, given: int, expected: int, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            for written in (record(2), record(3, micro_batch_tokens=1024)):
                ledger.record(written)
            found = state_at_start(ledger, 10, FIRST.model_copy(update={"generation": given})).plan
        assert found is not None
        assert found.generation == expected

    def test_counts_no_progress_of_earlier_attempts(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            ledger.begin_attempt(0.0, {}, {}, {})
            for step in range(1, 13):
                ledger.commit(step_record(step))
            assert state_at_start(ledger, 100).first_step == 13

    @pytest.mark.parametrize(("supervised", "gpus"), [(True, None), (False, 2)])
    def test_has_grown_here_only_without_a_supervisor(self, supervised: bool, gpus: int | None, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            plan = record(2).plan.model_copy(update={"policy_gpus": 2})
            ledger.record(record(2).model_copy(update={"plan": plan}))
            found = state_at_start(ledger, 10, supervised=supervised).plan
        assert found is not None
        assert found.policy_gpus == gpus


class TestTheFactsOfAPlan:
    """Of the machine on which its last change was made."""

    def test_stay_those_of_the_change_in_later_attempts(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            assert facts_of_plan(ledger, FIRST) == {}
            ledger.begin_attempt(0.0, {}, {}, {}, plan_facts={"policy_ranks": 1})
            ledger.record(record(2))
            assert facts_of_plan(ledger, record(2).plan) == {"policy_ranks": 1}
            ledger.begin_attempt(0.0, {}, {}, {}, plan_facts={"policy_ranks": 8})
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            assert facts_of_plan(ledger, record(2).plan) == {"policy_ranks": 1}
            assert facts_of_plan(ledger, record(3).plan) == {"policy_ranks": 8}, "the supervisor's plan"


class TestChanges:
    def test_are_in_the_ledger_when_they_are_adopted(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            changes = PlanChanges(ledger, RecoveryState(FIRST, 10))
            changes.adopt(adopted(changes.state, change(2)), None)
            assert changes.plan.generation == 2
            assert changes.state.adjustments == 1
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            again = PlanChanges(ledger, state_at_start(ledger, 10))
            assert again.own == [change(2)]
            assert again.state.adjustments == 1
            assert again.unconfirmed is not None

    def test_are_confirmed_once(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            changes = PlanChanges(ledger, RecoveryState(FIRST, 10))
            changes.adopt(adopted(changes.state, change(2)), None)
            changes.confirm(change(2, seconds=3.5), {"policy": 2.0})
            assert changes.unconfirmed is None
            [written] = plan_change_records(ledger.records)
        assert (written.change.seconds_to_recover, written.seconds) == (3.5, {"policy": 2.0})
        assert changes.state.changes == (change(2, seconds=3.5),)

    def test_before_a_failure_cost_nothing(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            changes = PlanChanges(ledger, RecoveryState(FIRST, 10))
            changes.adopt(adopted(changes.state, change(2, preventive=True)), None)
            assert changes.unconfirmed is None
            assert changes.state.adjustments == 0

    def test_of_the_supervisor_are_not_its_own(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            ledger.record(record(3, seconds=1.0))
            changes = PlanChanges(ledger, state_at_start(ledger, 10, record(3).plan, [change(2), change(3)]))
            assert [known.generation for known in changes.state.changes] == [2, 3]
            assert changes.state.changes[1].seconds_to_recover == 1.0, "the ledger knows more of its own"
            assert [own.generation for own in changes.own] == [3]

    def test_know_the_latest_committed_step(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            changes = PlanChanges(ledger, RecoveryState(FIRST, 10))
            ledger.commit(step_record(1))
            assert changes.state.committed_step == 1
