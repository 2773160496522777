"""Jobs with an image of their own: no controller, complete when every pod is."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_testing.simulated_cluster import POLICY_0, POLICY_1, SimulatedCluster, job_spec

SPEC = job_spec(trainer={"image": "registry.example/verl:1"})


def test_the_job_has_policy_pods_only() -> None:
    cluster = SimulatedCluster(spec=SPEC).run()
    assert set(cluster.pods) == {POLICY_0, POLICY_1}
    assert cluster.phase == "Running"


def test_the_job_is_complete_when_all_pods_are_and_keeps_them_for_their_logs() -> None:
    cluster = SimulatedCluster(spec=SPEC).run()
    cluster.end(POLICY_0, 0)
    cluster.settle()
    assert cluster.phase == "Running"
    cluster.tick(3600)
    cluster.settle()
    assert cluster.phase == "Running"
    cluster.end(POLICY_1, 0)
    cluster.settle()
    assert cluster.phase == "Complete"
    assert set(cluster.pods) == {POLICY_0, POLICY_1}


def test_a_pod_that_fails_restarts_all_of_them() -> None:
    cluster = SimulatedCluster(spec=SPEC).run()
    cluster.end(POLICY_1, 1, text="CUDA error")
    cluster.settle()
    assert cluster.condition(ConditionType.RECOVERING).status == "True"
    assert "CUDA error" in cluster.condition(ConditionType.RECOVERING).message
    cluster.next_attempt_runs()
    assert (cluster.phase, cluster.attempt.number) == ("Running", 2)


def test_a_suspended_job_stops_all_pods_at_once() -> None:
    cluster = SimulatedCluster(spec=SPEC).run()
    cluster.change_spec(suspend=True)
    cluster.settle()
    assert all(pod.deleting for pod in cluster.pods.values())
