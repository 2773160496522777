"""Which plan an attempt begins with, and what is known of its changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.memory_settings import MemorySettings
from rljob_trainer.ledger.ledger import Ledger
from rljob_trainer.ledger.records import plan_change_records
from rljob_trainer.recovery.plan_changes import PlanChanges, plan_in_force
from tests.unit.ledger.samples import PLAN, step_record
from tests.unit.ledger.samples import plan_change as change
from tests.unit.ledger.samples import plan_change_record as record

FIRST = PLAN
AUTO = MemorySettings()


class TestThePlanThatAnAttemptBeginsWith:
    def test_is_worked_out_where_there_is_none(self) -> None:
        assert plan_in_force(FIRST, None, [], AUTO, shares_gpu=True) == FIRST

    def test_is_the_given_one_where_nothing_was_changed_here(self) -> None:
        given = FIRST.model_copy(update={"generation": 4})
        assert plan_in_force(FIRST, given, [], AUTO, shares_gpu=True) == given

    @pytest.mark.parametrize(("given", "expected"), [(2, 3), (3, 3), (5, 5)])
    def test_is_the_one_of_the_higher_generation(self, given: int, expected: int) -> None:
        found = plan_in_force(
            FIRST,
            FIRST.model_copy(update={"generation": given}),
            [record(2), record(3, micro_batch_tokens=1024)],
            AUTO,
            shares_gpu=True,
        )
        assert found.generation == expected

    def test_has_what_was_pinned_since_as_it_is_pinned(self) -> None:
        pinned = MemorySettings(micro_batch_tokens=4096)
        found = plan_in_force(FIRST, None, [record(2)], pinned, shares_gpu=True)
        assert (found.generation, found.micro_batch_tokens) == (3, 4096)

    def test_keeps_its_generation_where_the_pins_are_as_it_is(self) -> None:
        pinned = MemorySettings(micro_batch_tokens=4096)
        assert plan_in_force(FIRST, None, [record(2, micro_batch_tokens=4096)], pinned, shares_gpu=True).generation == 2


class TestChanges:
    def test_are_in_the_ledger_when_they_are_adopted(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            changes = PlanChanges(ledger, FIRST, steps=10)
            changes.adopt(change(2), record(2).plan, None)
            assert changes.plan.generation == 2
            assert changes.history.adjustments == 1
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            again = PlanChanges(ledger, record(2).plan, steps=10)
            assert again.own == [change(2)]
            assert again.history.adjustments == 1
            assert again.unproven is not None

    def test_are_proved_once(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            changes = PlanChanges(ledger, FIRST, steps=10)
            changes.adopt(change(2), record(2).plan, None)
            changes.prove(change(2, seconds=3.5), {"policy": 2.0})
            assert changes.unproven is None
            [written] = plan_change_records(ledger.records)
        assert (written.change.seconds_to_recover, written.seconds) == (3.5, {"policy": 2.0})
        assert changes.history.changes == (change(2, seconds=3.5),)

    def test_on_an_early_warning_prove_nothing_and_cost_nothing(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            changes = PlanChanges(ledger, FIRST, steps=10)
            changes.adopt(change(2, preventive=True), record(2).plan, None)
            assert changes.unproven is None
            assert changes.history.adjustments == 0

    def test_of_the_supervisor_are_known_but_not_ones_own(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            ledger.record(record(3, seconds=1.0))
            changes = PlanChanges(ledger, record(3).plan, steps=10, of_supervisor=[change(2), change(3)])
            assert [known.generation for known in changes.history.changes] == [2, 3]
            assert changes.history.changes[1].seconds_to_recover == 1.0, "the ledger knows more of its own"
            assert [own.generation for own in changes.own] == [3]

    def test_are_decided_upon_with_the_steps_that_are_committed_by_then(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            changes = PlanChanges(ledger, FIRST, steps=10)
            ledger.commit(step_record(1))
            assert changes.history.committed_step == 1
