"""Bad input of people and programs ends in a condition, never in a crash or a hot loop."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_api.status import RLJobStatus
from rljob_operator.reconcile.desired import Desired
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, POLICY_1, SimulatedCluster, job_spec


def test_an_unreadable_spec_is_reported_and_resumes_once_fixed() -> None:
    cluster = SimulatedCluster(facts={"problem": "spec.rollout.engineArgs: must not set model"})
    assert cluster.settle() == Desired()
    stalled = cluster.condition(ConditionType.STALLED)
    assert (stalled.status, stalled.reason) == ("True", "InvalidSpec")
    assert "must not set model" in stalled.message
    assert cluster.phase == "Invalid"
    assert not cluster.holds(ConditionType.FAILED), "kubectl wait --for=condition=Failed is for the end of a job"
    cluster.facts = {}
    assert cluster.run().phase == "Running"
    assert not cluster.holds(ConditionType.STALLED)


def test_a_spec_that_is_spoilt_while_the_job_runs_leaves_the_pods_alone() -> None:
    cluster = SimulatedCluster().run()
    cluster.facts = {"problem": "spec.rollout.engineArgs: must not set model"}
    cluster.settle()
    assert cluster.phase == "Running"
    stalled = cluster.condition(ConditionType.STALLED)
    assert (stalled.status, stalled.reason) == ("True", "InvalidSpec")
    assert "the running attempt keeps its spec" in stalled.message
    cluster.end(CONTROLLER, 1, sentence="it broke", step=30)
    for pod in (POLICY_0, POLICY_1):
        cluster.end(pod, 83)
    cluster.settle()
    assert cluster.phase == "Invalid"
    assert cluster.attempt.end_time is None
    cluster.facts = {}
    cluster.next_attempt_runs()
    assert (cluster.phase, cluster.attempt.from_step) == ("Running", 31)


def test_a_job_that_completed_under_an_unreadable_spec_is_complete() -> None:
    cluster = SimulatedCluster().run()
    cluster.facts = {"problem": "spec.rollout.engineArgs: must not set model"}
    for pod in (CONTROLLER, POLICY_0, POLICY_1):
        cluster.end(pod, 0)
    cluster.settle()
    assert cluster.phase == "Invalid"
    cluster.facts = {}
    cluster.settle()
    assert cluster.phase == "Complete"
    assert not cluster.holds(ConditionType.FAILED)


def test_an_unmergeable_template_is_an_invalid_spec() -> None:
    cluster = SimulatedCluster(spec=job_spec(policy={"template": {"spec": {"containers": "rljob"}}}))
    assert cluster.settle() == Desired()
    assert cluster.condition(ConditionType.STALLED).reason == "InvalidSpec"
    assert cluster.events == ["InvalidSpec"]
    assert cluster.pods == {}
    cluster.change_spec(policy={"replicas": 2})
    assert cluster.run().phase == "Running"
    assert not cluster.holds(ConditionType.STALLED)


def test_a_lost_status_is_derived_again_from_pods_and_report() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 1, sentence="it broke", step=5)
    cluster.next_attempt_runs()
    cluster.reports(20)
    pods = dict(cluster.pods)
    cluster.set_status(None)
    cluster.settle()
    assert cluster.pods == pods, "nothing was restarted"
    assert cluster.attempt.number == 2
    assert cluster.phase == "Running"
    assert cluster.status is not None
    assert cluster.status.step == 20


def test_a_lost_status_of_a_complete_job_is_complete_again() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 0, sentence="done", step=60)
    cluster.settle()
    cluster.finish_deletions()
    cluster.set_status(RLJobStatus())
    cluster.settle()
    assert cluster.phase == "Complete"
    assert set(cluster.pods) == {CONTROLLER}


def test_a_job_that_is_called_complete_by_hand_goes_on() -> None:
    cluster = SimulatedCluster().run()
    assert cluster.status is not None
    complete = cluster.condition(ConditionType.COMPLETE).model_copy(update={"status": "True"})
    conditions = [complete if c.type == "Complete" else c for c in cluster.status.conditions]
    cluster.set_status(cluster.status.model_copy(update={"conditions": conditions}))
    cluster.next_attempt_runs()
    assert cluster.phase == "Running"


def test_times_to_come_do_not_stop_a_job() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 1, sentence="it broke", step=0)
    for _ in range(3):
        cluster.settle()
        cluster.finish_deletions()
    assert cluster.status is not None
    never = cluster.now.replace(year=9999)
    attempt = cluster.attempt.model_copy(update={"end_time": never})
    cluster.set_status(cluster.status.model_copy(update={"attempts": [attempt], "update_time": never}))
    cluster.settle()
    cluster.tick(10)
    assert cluster.run().phase == "Running"


def test_pods_of_an_ended_attempt_are_deleted_before_completion() -> None:
    cluster = SimulatedCluster().run()
    cluster.vanish(POLICY_1)
    cluster.change_pod(POLICY_0, attempt=0)
    cluster.change_pod(CONTROLLER, attempt=0)
    cluster.round()
    assert [pod.name for pod in cluster.pods.values() if pod.deleting] == [CONTROLLER]
    assert POLICY_1 not in cluster.pods


def test_a_foreign_pod_in_the_way_is_named_and_never_touched() -> None:
    cluster = SimulatedCluster(facts={"foreign_pods": (POLICY_0,)})
    cluster.round()
    desired = cluster.round()
    assert not desired.create
    assert not desired.delete_pods
    scheduled = cluster.condition(ConditionType.SCHEDULED)
    assert scheduled.reason == "ForeignPod"
    assert POLICY_0 in scheduled.message
    assert cluster.settle().requeue_after_seconds == 30


def test_a_foreign_pod_that_only_has_our_labels_is_no_hindrance() -> None:
    cluster = SimulatedCluster(facts={"foreign_pods": ("stranger",)})
    cluster.run()
    assert cluster.phase == "Running"
    assert cluster.events == ["ForeignPodIgnored"]


def test_what_the_api_server_refuses_is_quoted_and_tried_again_later() -> None:
    cluster = SimulatedCluster()
    cluster.round()
    cluster.facts = {"refused": 'pods "demo-controller" is forbidden: exceeded quota: gpus, requested: 1, limited: 0'}
    assert cluster.settle().requeue_after_seconds == 30
    scheduled = cluster.condition(ConditionType.SCHEDULED)
    assert scheduled.reason == "PodsRefused"
    assert "exceeded quota" in scheduled.message
    assert cluster.pods == {}
    cluster.tick(30)
    again = cluster.round()
    assert again.create
    assert again.requeue_after_seconds == 30


def test_an_unusable_step_report_is_reported_once() -> None:
    cluster = SimulatedCluster().run()
    cluster.reports(5_000_000)
    cluster.settle()
    cluster.tick(60)
    cluster.settle()
    assert cluster.events.count("StepReportIgnored") == 1
    assert cluster.phase == "Running"
    assert cluster.condition(ConditionType.RUNNING).reason == "StepReportIgnored"
    cluster.reports(6)
    cluster.tick(60)
    cluster.settle()
    assert cluster.condition(ConditionType.RUNNING).reason == "StepsCommitted"
    assert cluster.status is not None
    assert cluster.status.step == 6


def test_a_report_of_an_attempt_to_come_is_not_believed() -> None:
    cluster = SimulatedCluster().run()
    cluster.reports(6, attempt=9)
    cluster.settle()
    assert cluster.condition(ConditionType.RUNNING).reason == "StepReportIgnored"


def test_a_late_report_never_takes_steps_back() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(10)
    cluster.reports(6)
    cluster.settle()
    cluster.tick(10)
    cluster.reports(4)
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.step == 6


def test_a_job_with_an_invalid_template_can_be_suspended() -> None:
    cluster = SimulatedCluster(spec=job_spec(policy={"template": {"spec": {"containers": "rljob"}}}))
    cluster.settle()
    cluster.change_spec(suspend=True)
    assert cluster.settle() == Desired()
    assert cluster.phase == "Suspended"


def test_a_foreign_object_is_named_in_a_condition_and_one_event() -> None:
    message = "PersistentVolumeClaim demo-checkpoints exists and does not belong to this job"
    cluster = SimulatedCluster()
    cluster.round()
    cluster.facts = {"foreign_object": message}
    assert not cluster.round().create
    cluster.settle()
    scheduled = cluster.condition(ConditionType.SCHEDULED)
    assert (scheduled.status, scheduled.reason, scheduled.message) == ("False", "ForeignObject", message)
    cluster.tick(31)
    assert cluster.round().create, "it may be gone"
    assert cluster.events == ["ForeignObject"]
    cluster.facts = {}
    assert cluster.run().phase == "Running"


def test_a_missing_object_is_a_condition_until_it_exists() -> None:
    message = "expected ConfigMap my-task (spec.task.files.configMap) in namespace demo, found none: create it"
    cluster = SimulatedCluster()
    cluster.round()
    cluster.facts = {"missing_object": message}
    cluster.settle()
    scheduled = cluster.condition(ConditionType.SCHEDULED)
    assert (scheduled.status, scheduled.reason, scheduled.message) == ("False", "MissingObject", message)
    cluster.tick(31)
    assert cluster.round().create
    cluster.facts = {}
    assert cluster.run().phase == "Running"


def test_leftovers_of_a_deleted_job_are_reported_during_retries() -> None:
    cluster = SimulatedCluster()
    cluster.round()
    cluster.facts = {"left_behind": "ConfigMap demo-rljob belongs to a deleted job of this name"}
    cluster.tick(11)
    assert cluster.round().create
    assert "deleted job" in cluster.condition(ConditionType.SCHEDULED).message
