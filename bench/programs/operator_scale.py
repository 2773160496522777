"""A thousand RLJobs at once on fifty simulated nodes: seconds, writes, memory and CPU time of the operator.

    python -m bench.programs.operator_scale [--jobs 1000] [--nodes 50]

Control plane, KWOK and operator share this machine. Each job has one controller pod and one worker pod. KWOK starts the
pods that the scheduler has placed. When all jobs run, this program acts for the trainers: every controller reports its
last step and ends.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench.harness.operator_cluster import (
    control_plane,
    in_parallel,
    installed_operator,
    kwok,
    make_nodes,
    namespace_of,
    operator_requests,
    processes,
    seconds_after,
    start_all,
    transition,
    wait_until_all,
    writes,
)
from bench.harness.record import record
from bench.harness.samplers import MemoryWatch
from rljob_api.exit_codes import ExitCode
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import Object, ResourceClient
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob

BASE_PORT = 24100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=50)
    arguments = parser.parse_args()
    row = measure(arguments.jobs, arguments.nodes)
    name = "operator_scale" if arguments.jobs == 1000 else f"operator_scale_{arguments.jobs}"
    print(record(name, [row], f"{arguments.jobs} RLJobs of two pods at once on {arguments.nodes} KWOK nodes"))


def measure(jobs: int, nodes: int) -> dict[str, Any]:
    with control_plane(BASE_PORT, scheduler=True) as plane, kwok(plane):
        api = ResourceClient.from_kubeconfig(plane.kubeconfig)
        make_nodes(api, nodes)
        operator = installed_operator(plane, BASE_PORT + 10)
        operator.start()
        idle_bytes = operator.process.memory_info().rss
        with MemoryWatch(processes(operator)) as memory:
            row = start_all(api, "rljobs", (small_job(f"job-{number}") for number in range(jobs)), "Running")
            until_running = operator_requests(operator)
            running_cpu_seconds = operator.cpu_seconds()

            ended = time.time()
            in_parallel(lambda number: end(api, number), range(jobs))
            complete = wait_until_all(api, jobs, "Complete")
            in_all = operator_requests(operator)
        operator.stop()
    return row | {
        "nodes": nodes,
        "all_complete_seconds_after_last_report": max(
            seconds_after(ended, transition(j, "Complete")) for j in complete
        ),
        "writes_per_job_until_running": writes(until_running) / jobs,
        "writes_per_job": writes(in_all) / jobs,
        "operator_cpu_seconds_until_running": running_cpu_seconds,
        "operator_idle_bytes": idle_bytes,
        "peak_bytes": memory.peak_bytes,
    }


def small_job(name: str) -> Object:
    """A job with one controller and one worker, without a GPU, on an existing volume."""
    volume = {"nfs": {"server": "nfs.example", "path": "/jobs"}}
    return manifests.job(name, policy={"gpusPerReplica": 0}, checkpoint={"volume": volume})


def end(api: ResourceClient, number: int) -> None:
    """Last acts of a job's controller: its report and its termination message."""
    job = WatchedJob(api, SimulatedKubelet(api), namespace_of(number), f"job-{number}")
    job.report(step=10)
    job.end_controller(ExitCode.COMPLETE, step=10)


if __name__ == "__main__":
    main()
