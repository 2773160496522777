"""Pods in which a container beside the trainer keeps running, as a service mesh injects it."""

from __future__ import annotations

import pytest

from rljob_api.conditions import ConditionType
from rljob_testing.operator.eventually import eventually
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob

PROXY = "istio-proxy"


@pytest.mark.parametrize(("exit_code", "reason"), [(1, "Error"), (137, "OOMKilled")])
def test_a_trainer_that_fails_beside_a_sidecar_is_restarted(
    job: WatchedJob, kubelet: SimulatedKubelet, exit_code: int, reason: str
) -> None:
    job.create().run()
    kubelet.end(job.controller_pod(), exit_code, reason, sidecar=PROXY)
    eventually(lambda: job.attempt == 2, "the next attempt", context=lambda: job.status)
    job.wait_for(ConditionType.RUNNING)


def test_a_trainer_that_completes_beside_a_sidecar_completes_the_job(
    job: WatchedJob, kubelet: SimulatedKubelet
) -> None:
    job.create(ttlSecondsAfterFinished=3600).run()
    job.report(10)
    kubelet.end(job.controller_pod(), 0, sidecar=PROXY)
    job.wait_for(ConditionType.COMPLETE)
    running = job.wait_for(ConditionType.RUNNING, "False")
    eventually(
        lambda: (
            f"container {PROXY} of pod job-controller still runs" in job.condition(ConditionType.RUNNING)["message"]
        ),
        "the sidecar's name",
        context=lambda: running,
    )
    job.wait_for_pods(0)
