"""Ready, Stalled and observed generations, as kstatus and kubectl wait read them."""

from __future__ import annotations

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.status import RLJobStatus
from rljob_operator.reconcile.status_write import display
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, SimulatedCluster, job_spec

BROKEN = {"template": {"spec": {"containers": "rljob"}}}


def kstatus(cluster: SimulatedCluster) -> str:
    """The rules of sigs.k8s.io/cli-utils/pkg/kstatus/status for kinds that it does not know."""
    assert cluster.status is not None
    if cluster.status.observed_generation != cluster.generation:
        return "InProgress"
    if cluster.holds(ConditionType.STALLED):
        return "Failed"
    return "Current" if cluster.holds(ConditionType.READY) else "InProgress"


def kubectl_wait(cluster: SimulatedCluster, type_: ConditionType) -> bool:
    """The rule of kubectl wait: a condition about an earlier generation does not count."""
    condition = cluster.condition(type_)
    return condition.status == "True" and (condition.observed_generation or 0) >= cluster.generation


def test_a_job_is_in_progress_until_it_runs_as_a_batch_job_is() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    assert (kstatus(cluster), cluster.condition(ConditionType.READY).reason) == ("InProgress", "Pending")
    cluster.run()
    assert (kstatus(cluster), cluster.condition(ConditionType.READY).reason) == ("Current", "Running")
    cluster.end(CONTROLLER, 1, sentence="it broke", step=3)
    cluster.settle()
    ready = cluster.condition(ConditionType.READY)
    assert (kstatus(cluster), ready.reason, ready.message) == ("InProgress", "Recovering", "it broke (restart 1 of 3)")
    cluster.next_attempt_runs()
    cluster.end(CONTROLLER, 0, sentence="done", step=60)
    cluster.settle()
    assert (kstatus(cluster), cluster.condition(ConditionType.READY).reason) == ("Current", "Complete")


def test_a_failed_job_is_stalled_for_its_reason() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, ExitCode.BAD_INPUT, sentence="the data set is empty")
    cluster.settle()
    stalled = cluster.condition(ConditionType.STALLED)
    assert (kstatus(cluster), stalled.reason) == ("Failed", "BadInput")
    assert "the data set is empty" in stalled.message
    cluster.change_spec(retry=1)
    assert kstatus(cluster) == "InProgress", "the new generation is not observed yet"
    cluster.settle()
    assert kstatus(cluster) == "InProgress"


@pytest.mark.parametrize("facts", [{"foreign_pods": (POLICY_0,)}, {"foreign_object": "claim c exists"}])
def test_a_job_that_waits_for_a_person_is_stalled(facts: dict[str, object]) -> None:
    cluster = SimulatedCluster()
    cluster.round()
    cluster.facts = facts
    cluster.settle()
    assert kstatus(cluster) == "Failed"
    cluster.facts = {}
    cluster.tick(31)
    cluster.run()
    assert kstatus(cluster) == "Current"


def test_a_job_that_waits_for_nodes_or_is_suspended_is_in_progress() -> None:
    cluster = SimulatedCluster(spec=job_spec(suspend=True))
    cluster.settle()
    assert (kstatus(cluster), cluster.phase) == ("InProgress", "Suspended")
    cluster.change_spec(suspend=False)
    cluster.settle()
    cluster.unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", *cluster.pods)
    cluster.tick(60)
    cluster.settle()
    assert (kstatus(cluster), cluster.phase) == ("InProgress", "Pending")
    assert "Insufficient" in cluster.condition(ConditionType.READY).message


@pytest.mark.parametrize("code", [0, int(ExitCode.BAD_INPUT)])
def test_conditions_of_a_finished_job_keep_up_with_edits(code: int) -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, code, sentence="the end", step=60)
    cluster.settle()
    final = ConditionType.FAILED if code else ConditionType.COMPLETE
    assert kubectl_wait(cluster, final)
    cluster.change_spec(ttlSecondsAfterFinished=86400)
    assert not kubectl_wait(cluster, final)
    cluster.settle()
    assert kubectl_wait(cluster, final)


def test_only_stalled_and_ready_are_about_a_spec_that_cannot_be_used() -> None:
    cluster = SimulatedCluster().run()
    cluster.facts = {"problem": "spec.rollout.engineArgs: must not set model"}
    cluster.change_spec()
    cluster.settle()
    assert kstatus(cluster) == "Failed"
    assert cluster.status is not None
    observed = {condition.type: condition.observed_generation for condition in cluster.status.conditions}
    assert (observed["Stalled"], observed["Ready"], observed["Running"]) == (2, 2, 1)


def test_an_invalid_spec_stored_by_an_earlier_version_is_no_failure() -> None:
    cluster = SimulatedCluster(spec=job_spec(policy=BROKEN))
    cluster.settle()
    assert cluster.status is not None
    old = cluster.condition(ConditionType.FAILED).model_copy(update={"status": "True", "reason": "InvalidSpec"})
    stored = [
        condition for condition in cluster.status.conditions if condition.type not in ("Failed", "Stalled", "Ready")
    ]
    cluster.set_status(cluster.status.model_copy(update={"conditions": [*stored, old]}))
    cluster.settle()
    assert (cluster.phase, kstatus(cluster)) == ("Invalid", "Failed")
    assert not cluster.holds(ConditionType.FAILED)
    cluster.change_spec(policy={"replicas": 2})
    assert cluster.run().phase == "Running"


@pytest.mark.parametrize(
    ("step", "steps", "shown"), [(None, 10, "0/10"), (3, 10, "3/10"), (40, 10, "40"), (3, None, "")]
)
def test_more_committed_steps_than_requested_are_no_fraction(step: int | None, steps: int | None, shown: str) -> None:
    assert display(RLJobStatus(step=step, steps=steps)).step == shown
