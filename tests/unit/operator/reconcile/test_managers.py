"""Jobs that another controller, or another installation of the operator, reconciles."""

from __future__ import annotations

import pytest

from rljob_operator.reconcile.desired import Desired
from rljob_testing.simulated_cluster import CONTROLLER, SETTINGS, SimulatedCluster, job_spec

OURS = SETTINGS.installation


def test_the_first_write_claims_a_job_once() -> None:
    cluster = SimulatedCluster()
    assert cluster.round().claim == OURS
    assert cluster.round().claim is None
    assert cluster.operator == OURS


@pytest.mark.parametrize("deleting", [False, True])
def test_a_job_of_another_operator_is_left_alone_at_any_stage(deleting: bool) -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 1)
    cluster.operator, cluster.deleting = "other/rljob-operator", deleting
    desired = cluster.decide()
    [note] = desired.events
    assert desired == Desired(left_to="other/rljob-operator", events=(note,))
    assert note.reason == "ManagedByAnotherOperator"
    assert "kubectl annotate rljobs --all --all-namespaces rljob.dev/operator-" in note.message


def test_a_job_without_writes_is_not_claimed() -> None:
    """As a finished one, of which an upgrade finds thousands."""
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 0)
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    cluster.operator = ""
    assert cluster.decide().claim is None


@pytest.mark.parametrize(("manager", "is_ours"), [("rljob.dev/operator", True), ("kueue.x-k8s.io/multikueue", False)])
def test_a_job_that_names_another_manager_is_left_to_it(manager: str, is_ours: bool) -> None:
    cluster = SimulatedCluster(spec=job_spec(managedBy=manager))
    assert (cluster.decide() != Desired()) == is_ours
    cluster.facts = {"problem": "spec.algorithm: unknown field"}
    assert (cluster.decide() != Desired()) == is_ours, "also if the spec cannot be parsed"


def test_a_job_of_another_manager_that_is_deleted_keeps_no_finalizer_of_ours() -> None:
    """Which a manifest that was copied from another job brings along."""
    cluster = SimulatedCluster(spec=job_spec(managedBy="kueue.x-k8s.io/multikueue"), finalizer=True)
    assert cluster.decide() == Desired(), "nothing before its deletion"
    cluster.deleting = True
    assert cluster.decide() == Desired(finalizer=False)
    cluster.finalizer = False
    assert cluster.decide() == Desired()
