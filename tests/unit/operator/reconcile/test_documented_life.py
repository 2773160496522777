"""A job from `kubectl apply` to its end, the few writes that it takes, and its conditions."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import pytest

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.status import RLJobStatus
from rljob_api.step_report import TrainingWarningReason
from rljob_memory.recovery import GiveUpReason
from rljob_operator.events import EventReason
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.status import display
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    PLAN,
    POLICY_0,
    POLICY_1,
    SETTINGS,
    SimulatedCluster,
    created_job,
    new_job,
    rank_memory,
    reasons,
    running_job,
)
from tests.unit.operator.reconcile.memory_failures import FACTS

ALL_PODS = {CONTROLLER, POLICY_0, POLICY_1}


def test_the_first_round_records_the_attempt_and_the_second_creates_it() -> None:
    cluster = new_job()
    first = cluster.round()
    assert first == Desired(claim=cluster.settings.installation, finalizer=True, status=first.status)
    cluster.expect(number=1, start_time=cluster.now, observed_generation=1, phase="Pending")
    assert reasons(cluster.stored.conditions) == {
        "Suspended": "NotSuspended",
        "Fits": "NodesUnknown",
        "Scheduled": "WaitingForPods",
        "Running": "Starting",
        "MemoryPressure": "EnoughMemory",
        "Degraded": "NoWarning",
        "Recovering": "NoFailure",
        "Complete": "StepsRemain",
        "Failed": "NoFailure",
        "Ready": "Pending",
        "Stalled": "NotStalled",
    }
    assert {condition.status for condition in cluster.stored.conditions if condition.type != "Fits"} == {"False"}
    second = cluster.round()
    assert second.apply
    assert [manifest["kind"] for manifest in second.create][-3:] == ["Pod"] * 3
    assert (second.status, second.claim, cluster.operator) == (None, None, SETTINGS.installation)
    assert cluster.expect(pods=ALL_PODS).round() == Desired()
    cluster.run().expect(phase="Running", scheduled=True)
    assert (cluster.status_writes, cluster.events) == (2, [])


def test_pods_that_are_placed_and_take_long_to_start_show_as_scheduled() -> None:
    cluster = created_job().place().settled(wait=5, scheduled=False).tick(5).settled(scheduled=True, running=False)
    assert cluster.status_writes == 2


def test_pods_that_are_placed_one_after_the_other_are_reported_in_one_write() -> None:
    cluster = created_job().tick(60)  # later than the interval of progress
    for name in sorted(ALL_PODS):
        cluster.place(name).settled(scheduled=False, scheduled_contains="are being created").tick(2)
    assert cluster.run().expect(phase="Running", scheduled=True).status_writes == 2
    cluster = created_job().tick(60).place(CONTROLLER).settled(wait=5).tick(5)
    cluster.settled(scheduled=False, scheduled_contains="1 of 3 pods are scheduled")


def test_a_complete_job_keeps_its_controller_and_takes_further_steps() -> None:
    cluster = running_job(ttlSecondsAfterFinished=60).end(POLICY_0, 0)
    cluster.settled(reason=None)  # it may end shortly before the controller
    cluster.complete().expect(phase="Complete", pods={CONTROLLER}, step=60, completion_time=cluster.now)
    cluster.expect(reason="AllStepsCommitted", exit_code=0, to_step=60).settled(wait=60)
    assert cluster.events[-1] == "JobCompleted"
    cluster.raise_steps(90)
    cluster.run().expect(phase="Running", number=2, from_step=61, completion_time=None, restarts=0)
    cluster.expect(complete="StepsRaised").complete(step=90).settled(phase="Complete", wait=60)
    assert cluster.tick(60).round().delete_job


def test_steps_raised_during_a_run_extend_the_job_afterwards() -> None:
    cluster = running_job().raise_steps(90).settled(pods=ALL_PODS).complete()
    assert cluster.stored.attempts[0].reason == "StepsRaised"
    cluster.next_attempt_runs().expect(from_step=61, restarts=0, recovering=False)


def test_a_trainer_that_completes_without_progress_is_given_up() -> None:
    cluster = running_job(recovery={"maxRestarts": 1}).complete(step=0)
    cluster.next_attempt_runs().complete(step=0).expect(failed="RestartsExhausted")


def test_step_reports_reach_the_status_at_most_once_in_the_interval() -> None:
    cluster = running_job()
    before = cluster.status_writes
    cluster.tick(4).reports(1).settled(wait=6).tick(6)
    for step in range(1, 21):
        cluster.reports(step).settled().tick(1)
    assert cluster.status_writes - before == 2
    cluster.tick(10).settled(step=20, reward=0.5)
    assert cluster.stored.display is not None
    assert cluster.stored.display.step == "20/60"


def test_the_plan_follows_reports_and_later_pins_and_never_goes_back() -> None:
    cluster = running_job()
    for step, reported, known in ((1, 1, 1), (2, 7, 7), (3, 6, 7)):
        plan = PLAN.model_copy(update={"generation": reported})
        cluster.tick(10).reports(step, plan=plan, memory_facts=FACTS)
        cluster.settled(plan=PLAN.model_copy(update={"generation": known}))
    running = cluster.plan
    cluster.change_spec(memory={"microBatchTokens": 1000, "rolloutSleep": "Level1"}).settled(plan=running)
    cluster.end(CONTROLLER, 83, message="a worker was lost", step=3).tick(20)
    pinned = {"generation": 8, "micro_batch_tokens": 1000, "rollout_sleep": "Level1"}
    cluster.next_attempt_runs().expect(plan=PLAN.model_copy(update=pinned), plan_generation=8)


def test_memory_is_that_of_the_fullest_gpu() -> None:
    fullest = rank_memory(rank=1, device_free_bytes=40 << 30)
    memory = [rank_memory(), fullest, rank_memory(rank=2, device_total_bytes=0)]
    stored = running_job().tick(10).reports(1, memory=memory).settled().stored
    assert stored.memory is not None
    assert (stored.memory.outside_torch_bytes, stored.memory.headroom_bytes) == (20 << 30, 10 << 30)
    assert stored.display is not None
    assert (stored.display.peak, stored.display.headroom) == ("50.0Gi", "10.0Gi")


def test_an_overdue_job_fails_after_its_step_is_committed() -> None:
    cluster = running_job(activeDeadlineSeconds=3600).settled(wait=3600)
    cluster.tick(3600).settled(failed="DeadlineExceeded", deleting={CONTROLLER})
    assert cluster.stop().expect(pods=set()).settle() == Desired()


def test_the_deadline_does_not_count_time_in_the_queue_before_the_start() -> None:
    cluster = created_job(activeDeadlineSeconds=3600, queueName="gpus", facts={"kueue_installed": True}).gate()
    cluster.tick(86_400).settled(phase="Pending", start_time=None).gate(False)
    cluster.run().expect(start_time=cluster.now)
    cluster.tick(3600).settled(phase="Failed", failed="DeadlineExceeded")


# --- a step that takes too long is reported, and the operator does not intervene ---

QUICK, SLOW = {"update": 8.0}, {"rollout": 100.0, "update": 50.0}
SECONDS_AGO = 10.0


def reported(step: int, **report: Any) -> SimulatedCluster:
    """`step` steps were committed `SECONDS_AGO` seconds ago, and that is in the status."""
    cluster = running_job()
    cluster.reports(step, update_time=cluster.now, phase="update", **report)
    return cluster.tick(SECONDS_AGO).settled()


@pytest.mark.parametrize(
    ("step", "seconds", "allowed", "message"),
    [
        (5, QUICK, 600, "step 6 (update) is overdue: the trainer has reported nothing since 2026-01-01 00:00:00 UTC"),
        (5, SLOW, 3000, "the previous step took 150 s"),
        (0, None, 1800, "step 1"),
        (60, QUICK, 600, "the final model is overdue"),
    ],
)
def test_an_overdue_step_is_reported_once(step: int, seconds: Any, allowed: float, message: str) -> None:
    cluster = reported(step, seconds=seconds)
    cluster.expect(wait=allowed - SECONDS_AGO)
    cluster.tick(allowed - SECONDS_AGO - 1).settled(running="StepsCommitted")
    cluster.tick(1).settled(running=(True, "StepOverdue"), running_contains=message, wait=None)
    cluster.tick(700).settled().tick(700).settled(pods=ALL_PODS)
    assert cluster.events.count("StepOverdue") == 1
    writes = cluster.status_writes
    cluster.reports(min(step + 1, 60), update_time=cluster.now, seconds=QUICK).settled(running="StepsCommitted")
    assert cluster.status_writes == writes + 1


def test_only_a_timed_report_of_the_attempt_describes_the_step_in_progress() -> None:
    running_job().reports(5).tick(10_000).settled(running="StepsCommitted")
    cluster = reported(5, seconds=QUICK).end(CONTROLLER, ExitCode.ERROR, message="an error")
    cluster.next_attempt_runs().expect(number=2).tick(700).settled(running="StepsCommitted")


# --- whose job it is ---


@pytest.mark.parametrize("deleting", [False, True])
def test_a_job_of_another_operator_is_left_alone_at_any_stage(deleting: bool) -> None:
    cluster = running_job().end(CONTROLLER, 1)
    cluster.operator, cluster.deleting = "other/rljob-operator", deleting
    desired = cluster.decide()
    [note] = desired.events
    assert desired == Desired(events=(note,))
    assert note.reason == "ManagedByAnotherOperator"
    assert "kubectl annotate rljobs --all --all-namespaces rljob.dev/operator-" in note.message


def test_a_finished_job_is_not_claimed() -> None:
    """An upgrade may find thousands, none of which needs a write."""
    cluster = running_job().complete().settled()
    cluster.operator = ""
    assert cluster.decide().claim is None


@pytest.mark.parametrize(("manager", "is_ours"), [("rljob.dev/operator", True), ("kueue.x-k8s.io/multikueue", False)])
def test_a_job_that_names_another_manager_is_left_to_it(manager: str, is_ours: bool) -> None:
    cluster = new_job(managedBy=manager)
    assert (cluster.decide() != Desired()) == is_ours
    cluster.facts = {"problem": "spec.algorithm: unknown field"}
    assert (cluster.decide() != Desired()) == is_ours, "also if the spec cannot be parsed"


def test_a_job_of_another_manager_that_is_deleted_keeps_no_finalizer_of_ours() -> None:
    """Which a manifest that was copied from another job brings along."""
    cluster = new_job(managedBy="kueue.x-k8s.io/multikueue")
    cluster.finalizer = True
    assert cluster.decide() == Desired(), "nothing before its deletion"
    cluster.deleting = True
    assert cluster.decide() == Desired(finalizer=False)
    cluster.finalizer = False
    assert cluster.decide() == Desired()


# --- objects that running pods need ---


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ({}, {"ConfigMap", "Service", "ServiceAccount", "Role", "RoleBinding", "Secret", "StepReport"}),
        ({"trainer": {"image": "registry.example/verl:1"}}, {"ConfigMap", "Service"}),
    ],
)
def test_objects_are_looked_up_when_it_is_time_and_all_pods_are_there(spec: dict[str, Any], kinds: set[str]) -> None:
    cluster = new_job(**spec, facts={"objects_check_seconds": 0.0})
    cluster.round()
    creating = cluster.round()
    assert creating.create
    assert creating.verify == ()
    waiting = cluster.observes(objects_check_seconds=120.0).run().round()
    assert (waiting.verify, waiting.requeue_after_seconds) == ((), 120.0)
    due = cluster.observes(objects_check_seconds=0.0).raise_steps(90).round()
    assert {manifest["kind"] for manifest in due.verify} - {"NetworkPolicy"} == kinds
    assert due.requeue_after_seconds is not None
    assert (due.apply, due.create) == ((), ()), "a changed spec does not reach a running attempt"
    cluster.change_spec(suspend=True)
    assert [cluster.round().verify for _ in range(3)] == [(), (), ()]


# --- conditions as kstatus, kubectl wait and docs/job-life.md have them ---

PAGE = (Path(__file__).parents[4] / "docs" / "job-life.md").read_text(encoding="utf-8")


def kubectl_wait(cluster: SimulatedCluster, type_: ConditionType) -> bool:
    """The rule of kubectl wait: a condition about an earlier generation does not count."""
    condition = cluster.condition(type_)
    return condition.status == "True" and (condition.observed_generation or 0) >= cluster.generation


def test_a_job_is_in_progress_until_it_runs_as_a_batch_job_is() -> None:
    cluster = created_job(suspend=True).expect(phase="Suspended", kstatus="InProgress")
    cluster.change_spec(suspend=False).settled()
    cluster.unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", *cluster.pods).tick(60)
    cluster.settled(phase="Pending", kstatus="InProgress", ready="Pending", ready_contains="Insufficient")
    cluster.run().expect(kstatus="Current", ready="Running").end(CONTROLLER, 1, message="it broke", step=3)
    cluster.settled(kstatus="InProgress", ready="Recovering", ready_contains="it broke (restart 1 of 3)")
    cluster.next_attempt_runs().complete().expect(kstatus="Current", ready="Complete")


def test_a_failed_job_is_stalled_for_its_reason() -> None:
    cluster = running_job().end(CONTROLLER, ExitCode.BAD_INPUT, message="the data set is empty")
    cluster.settled(kstatus="Failed", stalled="BadInput", stalled_contains="the data set is empty").change_spec(retry=1)
    cluster.expect(kstatus="InProgress")  # the new generation is not observed yet
    cluster.settled(kstatus="InProgress")


@pytest.mark.parametrize("facts", [{"foreign_pods": (POLICY_0,)}, {"foreign_object": "claim c exists"}])
def test_a_job_that_waits_for_a_person_is_stalled(facts: dict[str, Any]) -> None:
    cluster = new_job()
    cluster.round()
    cluster.observes(**facts).settled(kstatus="Failed").observes().tick(31).run().expect(kstatus="Current")


@pytest.mark.parametrize("code", [0, int(ExitCode.BAD_INPUT)])
def test_conditions_of_a_finished_job_keep_up_with_edits(code: int) -> None:
    cluster = running_job().end(CONTROLLER, code, message="the end", step=60).settled()
    final = ConditionType.FAILED if code else ConditionType.COMPLETE
    assert kubectl_wait(cluster, final)
    cluster.change_spec(ttlSecondsAfterFinished=86400)
    assert not kubectl_wait(cluster, final)
    cluster.settled()
    assert kubectl_wait(cluster, final)


def test_only_stalled_and_ready_are_about_a_spec_that_cannot_be_used() -> None:
    cluster = running_job().observes(problem="spec.rollout.engineArgs: must not set model").change_spec()
    cluster.settled(kstatus="Failed")
    observed = {condition.type: condition.observed_generation for condition in cluster.stored.conditions}
    assert (observed["Stalled"], observed["Ready"], observed["Running"]) == (2, 2, 1)


@pytest.mark.parametrize(
    ("step", "steps", "shown"), [(None, 10, "0/10"), (3, 10, "3/10"), (40, 10, "40"), (3, None, "")]
)
def test_more_committed_steps_than_requested_are_no_fraction(step: int | None, steps: int | None, shown: str) -> None:
    assert display(RLJobStatus(step=step, steps=steps)).step == shown


def documented(section: str) -> set[str]:
    """First column of the table under a heading."""
    text = re.split(r"^#+ ", PAGE.split(f"# {section}\n")[1], flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))


def test_every_reason_of_a_condition_is_documented() -> None:
    of_the_engine = set(GiveUpReason) - {GiveUpReason.NOTHING_LEFT, GiveUpReason.LEFT_TO_SUPERVISOR}
    reasons = {reason.value for reason in [*ConditionReason, *of_the_engine]} | set(get_args(TrainingWarningReason))
    assert documented("Conditions") == reasons
    types = re.findall(r"^\| \*\*(\w+)\*\* \|", PAGE, flags=re.MULTILINE)
    assert set(types) == {type_.value for type_ in ConditionType}


@pytest.mark.parametrize(("section", "reasons"), [("Attempts", AttemptReason), ("Events", EventReason)])
def test_every_reason_of_attempts_and_events_is_documented(section: str, reasons: type[StrEnum]) -> None:
    assert documented(section) == {reason.value for reason in reasons}
