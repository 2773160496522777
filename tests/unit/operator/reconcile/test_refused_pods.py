"""Attempts that are refused in part: the pods that exist are released, so that they block no other job."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from rljob_api.conditions import ConditionType
from rljob_operator.reconcile.desired import Desired
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, POLICY_1, SimulatedCluster, job_spec

GANGS: list[Any] = [
    ({}, {}),
    ({"gang": "Volcano"}, {"volcano_installed": True}),
    ({"queueName": "team"}, {"kueue_installed": True}),
]


@pytest.mark.parametrize("are_placed", [False, True])
@pytest.mark.parametrize(("spec", "facts"), GANGS)
def test_pods_do_not_wait_for_ever_for_those_that_are_refused(
    spec: dict[str, Any], facts: dict[str, Any], are_placed: bool
) -> None:
    cluster = SimulatedCluster(spec=job_spec(**spec), facts=dict(facts))
    cluster.settle()
    cluster.vanish(POLICY_1)
    if are_placed:
        cluster.change_pod(CONTROLLER, gated=False)
        cluster.place(CONTROLLER)
        cluster.start(CONTROLLER)
    cluster.facts["refused"] = "exceeded quota: gpus"
    cluster.settle()
    assert set(cluster.pods) == {CONTROLLER, POLICY_0}
    cluster.tick(600)
    for _ in range(3):
        cluster.settle()
        cluster.finish_deletions()
    assert cluster.pods == {}
    scheduled = cluster.condition(ConditionType.SCHEDULED)
    assert (scheduled.status, scheduled.reason) == ("False", "PlacementTimedOut")
    assert (
        "only 2 of 3 pods exist, so all are deleted: the API server refused: exceeded quota: gpus" in scheduled.message
    )


def test_without_a_gang_pods_stay_though_others_are_refused() -> None:
    cluster = SimulatedCluster(spec=job_spec(gang="Disabled"))
    cluster.settle()
    cluster.vanish(POLICY_1)
    cluster.facts = {"refused": "exceeded quota: gpus"}
    cluster.tick(6000)
    cluster.settle()
    assert not any(pod.deleting for pod in cluster.pods.values())
    assert cluster.attempt.reason is None


class JobInQuota(SimulatedCluster):
    """A job in a namespace with a quota of pods, which creates one pod in each round."""

    quota = 4
    created_in_round = False
    namespace: ClassVar[list[JobInQuota]] = []

    def _create_pod(self, manifest: dict[str, Any]) -> None:
        if manifest["metadata"]["name"] in self.pods or self.created_in_round:
            return
        if sum(len(job.pods) for job in self.namespace) >= self.quota:
            self.facts["refused"] = "exceeded quota: pods"
            return
        self.created_in_round = True
        self.facts.pop("refused", None)
        super()._create_pod(manifest)

    def round(self, *arguments: Any, **named: Any) -> Desired:
        self.created_in_round = False
        return super().round(*arguments, **named)


@pytest.mark.parametrize(("spec", "facts"), GANGS)
def test_two_jobs_that_each_have_half_of_a_quota_both_complete(spec: dict[str, Any], facts: dict[str, Any]) -> None:
    jobs = [JobInQuota(spec=job_spec(**spec), facts=dict(facts), uid=uid) for uid in ("first", "second")]
    JobInQuota.namespace = jobs
    for _ in range(4):
        for job in jobs:
            job.round()
    assert [len(job.pods) for job in jobs] == [2, 2]
    for _ in range(500):
        for job in jobs:
            job.round()
            job.finish_deletions()
            if len(job.pods) == 3 and not job.holds(ConditionType.COMPLETE):
                for name in job.pods:
                    job.change_pod(name, gated=False)
                job.run()
                job.end(CONTROLLER, 0)
                job.settle()
                job.vanish(CONTROLLER)
            job.tick(5)
    assert all(job.holds(ConditionType.COMPLETE) for job in jobs)
