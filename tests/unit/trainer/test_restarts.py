"""How often one command begins anew under the same plan."""

from __future__ import annotations

from rljob_trainer.errors import BadInput, DeviceOutOfMemory, OutputUnavailable, TrainerError, WorkerLost
from rljob_trainer.recovery.restarts import Restarts

LOST = WorkerLost("policy-0 died while updating").of("policy-0")


def test_lost_processes_are_worth_as_many_restarts_as_the_manifest_says() -> None:
    restarts = Restarts(2)
    assert [restarts.grant(LOST, committed=0) for _ in range(3)] == [True, True, False]
    assert restarts.count == "restart 2 of 2"


def test_progress_gives_a_restart_back() -> None:
    restarts = Restarts(1)
    assert all(restarts.grant(LOST, committed=10) for _ in range(5))


def test_an_attempt_that_says_the_same_again_without_a_step_is_the_last() -> None:
    failed = TrainerError("policy-0 failed while updating: ValueError: no").of("policy-0")
    restarts = Restarts(5)
    assert restarts.grant(failed, committed=1)
    assert restarts.grant(failed, committed=0)
    assert not restarts.grant(failed, committed=0)


def test_what_a_restart_cannot_mend_gets_none() -> None:
    for failure in (
        BadInput("no such model").of("policy-0"),
        OutputUnavailable("the disk is full"),
        DeviceOutOfMemory("CUDA out of memory").of("policy-0"),
        TrainerError("Ray did not start"),
    ):
        assert not Restarts(3).grant(failure, committed=0)
