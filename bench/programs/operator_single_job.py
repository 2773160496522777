"""One RLJob after another: reaction times of the operator, and requests to the API server per job.

    python -m bench.programs.operator_single_job [--jobs 10]

A proxy counts every request of the operator. This program places and starts pods at once, so the times are those of the
operator and the API server alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.harness.operator_cluster import NAMESPACE, control_plane, installed_operator
from bench.harness.record import record
from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.recorded_request import RecordedRequest
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet, node_for
from rljob_testing.operator.watched_job import WatchedJob

BASE_PORT = 24200
IDLE_SECONDS = 10.0
_LOOK_SECONDS = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10)
    jobs = parser.parse_args().jobs
    print(record("operator_single_job", [measure(jobs)], f"{jobs} RLJobs of two pods, one after the other"))


def measure(jobs: int) -> dict[str, Any]:
    with control_plane(BASE_PORT, scheduler=False) as plane:
        proxy = FaultProxy(plane.url, plane.ca, BASE_PORT + 10)
        proxy.start()
        api = ApiClient.from_kubeconfig(plane.kubeconfig)
        kubelet = SimulatedKubelet(api)
        kubelet.start()
        operator = installed_operator(plane, BASE_PORT + 11, proxy.url)
        operator.start()
        lives = [live(WatchedJob(api, kubelet, NAMESPACE, f"job-{n}"), proxy, idle=n == 0) for n in range(jobs)]
        reconcile = reconcile_seconds(operator)
        memory_bytes = operator.process.memory_info().rss
        operator.stop()
        kubelet.stop()
        proxy.stop()
    measured = ("pods_created_seconds", "running_seconds", "complete_seconds")
    return {
        "jobs": jobs,
        **{name: statistics.median(life[name] for life in lives) for name in measured},
        "requests_per_life": statistics.median(len(life["requests"]) for life in lives),
        "requests_of_a_life": lives[-1]["requests"],
        "requests_while_idle": lives[0]["requests_while_idle"],
        "idle_seconds": IDLE_SECONDS,
        **reconcile,
        "operator_bytes": memory_bytes,
    }


def live(job: WatchedJob, proxy: FaultProxy, *, idle: bool) -> dict[str, Any]:
    """Run one job from apply to Complete. `idle`: pause while it runs, and count requests."""
    first = len(proxy.requests)
    began = time.monotonic()
    job.create()
    created = seconds_until(lambda: len(job.pods) == 2, began)

    placed = time.monotonic()
    for pod in job.pods.values():
        job.kubelet.place(pod, node_for(pod))
        job.kubelet.run(pod)
    running = seconds_until(lambda: job.condition(ConditionType.RUNNING).get("status") == "True", placed)

    job.report(step=5)
    while_idle = requests_in(IDLE_SECONDS, job, proxy) if idle else 0

    job.report(step=10)
    ended = time.monotonic()
    job.end_controller(ExitCode.COMPLETE)
    complete = seconds_until(lambda: job.condition(ConditionType.COMPLETE).get("status") == "True", ended)
    proxy.wait_until_quiet(seconds=1.0)
    return {
        "pods_created_seconds": created,
        "running_seconds": running,
        "complete_seconds": complete,
        "requests_while_idle": while_idle,
        "requests": [f"{r.verb} {r.resource}" for r in about_jobs(proxy.requests[first:])],
    }


def requests_in(seconds: float, job: WatchedJob, proxy: FaultProxy) -> int:
    """Requests of the operator while nothing changes, after the last report has reached the status."""
    seconds_until(lambda: job.status.get("step") == 5, time.monotonic())
    proxy.wait_until_quiet(seconds=1.0)
    before = len(about_jobs(proxy.requests))
    time.sleep(seconds)
    return len(about_jobs(proxy.requests)) - before


def about_jobs(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """Without watches, which belong to the operator rather than to a job, and without the Lease."""
    return [r for r in requests if r.resource not in ("", "leases") and r.verb not in ("watch", "list")]


def seconds_until(reached: Callable[[], bool], began: float) -> float:
    while not reached():
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - began


def reconcile_seconds(operator: OperatorProcess) -> dict[str, float]:
    """Count and mean of all reconciles, including their writes, from the operator's metrics."""
    text = httpx.get(f"http://127.0.0.1:{operator.metrics_port}/metrics").raise_for_status().text
    values = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    count = values["workqueue_work_duration_seconds_count"]
    return {"reconciles": count, "reconcile_mean_seconds": values["workqueue_work_duration_seconds_sum"] / count}


if __name__ == "__main__":
    main()
