"""Ten thousand RLJobs on five thousand simulated nodes: the operator's memory, and its reaction to running jobs.

    python -m bench.programs.operator_large [--jobs 10000] [--nodes 5000] [--seconds 120]

Half of the jobs run; the pods of the other half find no node. Then nodes are cordoned and uncordoned, and the
controllers of running jobs report a step. A reaction is measured from the answer to the report until the RLJob has the
step, so it includes the watch, the queue, the reconcile and the write of the status. Each job has one controller pod
and one worker pod. Control plane, KWOK and operator share this machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.harness.many_jobs import in_parallel, small_job
from bench.harness.operator_cluster import (
    NAMESPACE,
    MemoryWatch,
    control_plane,
    installed_operator,
    operator_requests,
    processes,
)
from bench.harness.record import record
from bench.harness.simulated_nodes import kwok, make_nodes
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob

BASE_PORT = 24500
FLAPS_A_SECOND = 10
REPORTERS = 4
_LOOK_SECONDS = 5.0
_POLL_SECONDS = 0.05

Samples = dict[tuple[str, str], float]
"""Values of metrics by name and by the label `priority`, `phase` or `le`; see `samples`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=5_000)
    parser.add_argument("--seconds", type=float, default=120.0, help="time with reports and flapping nodes")
    arguments = parser.parse_args()
    row = measure(arguments.jobs, arguments.nodes, arguments.seconds)
    name = "operator_large" if arguments.jobs == 10_000 else f"operator_large_{arguments.jobs}"
    note = f"{arguments.jobs} RLJobs of two pods on {arguments.nodes} KWOK nodes, half of them pending"
    print(record(name, [row], note))


def measure(jobs: int, nodes: int, seconds: float) -> dict[str, Any]:
    with control_plane(BASE_PORT, scheduler=True) as plane, kwok(plane, heartbeats=False):
        api = ApiClient.from_kubeconfig(plane.kubeconfig)
        make_nodes(api, nodes)
        operator = installed_operator(plane, BASE_PORT + 10)
        operator.start()
        with MemoryWatch(processes(operator)) as memory:
            began = time.monotonic()
            half = jobs // 2
            create(api, [f"run-{number}" for number in range(half)])
            wait(lambda: samples(operator)["rljob_operator_jobs", "Running"] >= half, f"{half} running jobs")
            create(api, [f"wait-{number}" for number in range(jobs - half)], nodeSelector={"type": "none"})
            wait(lambda: operator_requests(operator)["create", "pods"] >= 2 * jobs, f"{2 * jobs} pods")
            wait(lambda: queued(operator) == 0, "an empty queue")
            start_seconds = time.monotonic() - began
            quiet_bytes = operator.process.memory_info().rss
            before, cpu_before = samples(operator), operator.cpu_seconds()
            reactions, flaps = with_flapping_nodes(api, nodes, half, seconds)
            after, cpu_after = samples(operator), operator.cpu_seconds()
        operator.stop()
    percentiles = statistics.quantiles(reactions, n=100)
    return {
        "jobs": jobs,
        "nodes": nodes,
        "start_seconds": start_seconds,
        "pending_jobs": jobs - half,
        "seconds": seconds,
        "node_changes": flaps,
        "reports": len(reactions),
        "reaction_p50_seconds": percentiles[49],
        "reaction_p99_seconds": percentiles[98],
        "reaction_max_seconds": max(reactions),
        "queue_p99_seconds_at_most": quantile(before, after, "running", 0.99),
        "queue_pending_p99_seconds_at_most": quantile(before, after, "pending", 0.99),
        "reconciles": delta(before, after, "workqueue_work_duration_seconds_count"),
        "operator_cpu_share": (cpu_after - cpu_before) / seconds,
        "operator_quiet_bytes": quiet_bytes,
        "peak_bytes": memory.peak_bytes,
    }


def create(api: ApiClient, names: list[str], **template_spec: Any) -> None:
    in_parallel(lambda name: api.create("rljobs", small_job(name, **template_spec), NAMESPACE), names)


def wait(reached: Callable[[], bool], what: str) -> None:
    print(f"waiting for {what}", flush=True)
    while not reached():
        time.sleep(_LOOK_SECONDS)


def with_flapping_nodes(api: ApiClient, nodes: int, running: int, seconds: float) -> tuple[list[float], int]:
    """Reactions to reports in seconds, and the number of changed nodes."""
    over = threading.Event()
    flaps: list[str] = []
    reactions: list[float] = []

    def flap() -> None:
        while not over.wait(1 / FLAPS_A_SECOND):
            node = f"node-{random.randrange(nodes)}"
            api.merge("nodes", node, {"spec": {"unschedulable": len(flaps) % 2 == 0 or None}})
            flaps.append(node)

    def report(numbers: list[int]) -> None:
        for number in numbers:
            if over.is_set():
                return
            reactions.append(reaction(api, f"run-{number}"))

    order = random.sample(range(running), running)
    reaction(api, f"run-{order.pop()}")  # the first server-side apply takes the API server a second
    threads = [threading.Thread(target=report, args=(order[part::REPORTERS],)) for part in range(REPORTERS)]
    threads.append(threading.Thread(target=flap))
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    return reactions, len(flaps)


def reaction(api: ApiClient, name: str) -> float:
    """Seconds from the first report of a job until its status has the step."""
    WatchedJob(api, SimulatedKubelet(api), NAMESPACE, name).report(step=1)
    began = time.monotonic()
    while api.get("rljobs", name, NAMESPACE)["status"].get("step") != 1:
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - began


def samples(operator: OperatorProcess) -> Samples:
    """Metrics of the operator; 0 for those that it does not have yet."""
    text = httpx.get(f"http://127.0.0.1:{operator.metrics_port}/metrics").raise_for_status().text
    found = _Zero()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [sample.labels[name] for name in ("priority", "phase", "le") if name in sample.labels]
            found[sample.name, " ".join(labels)] = sample.value
    return found


class _Zero(Samples):
    def __missing__(self, key: tuple[str, str]) -> float:
        return 0.0


def queued(operator: OperatorProcess) -> float:
    found = samples(operator)
    return found["workqueue_depth", "running"] + found["workqueue_depth", "pending"]


def delta(before: Samples, after: Samples, name: str, label: str = "") -> float:
    return after[name, label] - before[name, label]


def quantile(before: Samples, after: Samples, priority: str, share: float) -> float:
    """Upper bound of the bucket of the histogram that contains the quantile of the time in the queue."""
    name = "workqueue_queue_duration_seconds"
    wanted = share * delta(before, after, f"{name}_count", priority)
    bounds = [label.split(" ")[1] for found, label in after if found == f"{name}_bucket" and label.startswith(priority)]
    counts = {bound: delta(before, after, f"{name}_bucket", f"{priority} {bound}") for bound in bounds}
    return min(float(bound) for bound, count in counts.items() if count >= wanted)


if __name__ == "__main__":
    main()
