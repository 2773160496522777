"""Objects that running pods need are looked up from time to time, and created again if they were deleted."""

from __future__ import annotations

import pytest

from rljob_testing.simulated_cluster import SimulatedCluster, job_spec


def test_objects_are_looked_up_when_it_is_time() -> None:
    cluster = SimulatedCluster().run()
    cluster.facts = {"objects_check_seconds": 120.0}
    waiting = cluster.round()
    assert (waiting.verify, waiting.requeue_after_seconds) == ((), 120.0)
    cluster.facts = {"objects_check_seconds": 0.0}
    due = cluster.round()
    kinds = {manifest["kind"] for manifest in due.verify}
    own = {"ConfigMap", "Service", "ServiceAccount", "Role", "RoleBinding", "Secret", "StepReport"}
    assert kinds - {"NetworkPolicy"} == own
    assert due.requeue_after_seconds is not None
    assert (due.apply, due.create) == ((), ())


def test_nothing_is_looked_up_while_pods_are_missing_or_stop() -> None:
    cluster = SimulatedCluster(facts={"objects_check_seconds": 0.0})
    cluster.round()
    creating = cluster.round()
    assert creating.create
    assert creating.verify == ()
    cluster.facts = {}
    cluster.run()
    cluster.facts = {"objects_check_seconds": 0.0}
    cluster.change_spec(suspend=True)
    assert [cluster.round().verify for _ in range(3)] == [(), (), ()]


@pytest.mark.parametrize("trainer", [None, {"image": "registry.example/verl:1"}])
def test_a_changed_spec_does_not_reach_a_running_attempt(trainer: dict[str, str] | None) -> None:
    cluster = SimulatedCluster(spec=job_spec() | ({"trainer": trainer} if trainer else {})).run()
    cluster.facts = {"objects_check_seconds": 0.0}
    cluster.raise_steps(90)
    assert cluster.round().apply == ()
