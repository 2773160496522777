"""Jobs with an image of their own: no controller, complete when every pod is."""

from __future__ import annotations

import pytest

from rljob_api.conditions import ConditionType
from rljob_testing.simulated_cluster import POLICY_0, POLICY_1, SimulatedCluster, job_spec

SPEC = job_spec(trainer={"image": "registry.example/verl:1"})


def test_the_job_has_policy_pods_only() -> None:
    cluster = SimulatedCluster(spec=SPEC).run()
    assert set(cluster.pods) == {POLICY_0, POLICY_1}
    assert cluster.phase == "Running"


def test_the_job_completes_with_all_pods_and_keeps_their_logs() -> None:
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


@pytest.mark.parametrize("code", [2, 84, 130, 143])
def test_exit_codes_of_another_trainer_have_no_meaning_of_rljobs(code: int) -> None:
    cluster = SimulatedCluster(spec=SPEC).run()
    cluster.end(POLICY_1, code)
    cluster.settle()
    assert (cluster.attempt.reason, cluster.attempt.exit_code) == ("Error", code)
    assert (
        cluster.attempt.message
        == f"pod demo-policy-1 exited with code {code} (Error); kubectl logs demo-policy-1 has more"
    )
    assert cluster.status is not None
    assert cluster.status.restarts == 1


def test_a_termination_message_of_another_trainer_has_rljobs_meaning() -> None:
    cluster = SimulatedCluster(spec=SPEC).run()
    cluster.end(POLICY_1, 84, sentence="the data set is empty")
    cluster.settle()
    failed = cluster.condition(ConditionType.FAILED)
    assert (failed.reason, "the data set is empty" in failed.message) == ("BadInput", True)
