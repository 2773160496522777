"""Records a job in pods that runs out of GPU memory and recovers under another memory plan.

    python -m bench.programs.recovery_in_pods --fault ActivationSpike@update:4 --out DIRECTORY

Starts a control plane, containerd, one real kubelet and the operator, applies an RLJob whose pods use this machine's
Python, follows it to its end, and stops everything. bench/harness/gpu_cluster/README.md lists the requirements. Without
a GPU, injected faults raise torch's error instead of using up memory.

Writes to `--out`: recovery_in_pods.json (seconds by part, the pods before and after, plan changes, attempts), watch.txt
(`kubectl get rljobs -w`), describe.txt (`kubectl describe rljob` and the Events), ledger.jsonl, and logs.txt (the ends
of all logs). Exit code 0: the job is complete.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from bench.harness.gpu_cluster import host_pods
from bench.harness.gpu_cluster.job import recovery_job
from bench.harness.gpu_cluster.namespaces import in_own_namespaces, rerun_in_own_namespaces, set_up
from bench.harness.gpu_cluster.one_node import OneNodeCluster
from bench.harness.gpu_cluster.recording import Recording, printed_watch
from bench.harness.gpu_cluster.report import write_report
from rljob_api.fault_injection import Fault
from rljob_cluster.binaries import binary_directory
from rljob_testing.ballast import ballast
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.repository import ROOT
from rljob_trainer.hardware import torch_version

STATE = Path("/tmp/rljob-gpu-cluster")
CRDS = ROOT / "crds" / "manifests"


def main(options: argparse.Namespace) -> int:
    if not in_own_namespaces():
        return rerun_in_own_namespaces()
    deadline = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    set_up(STATE, options.binaries)
    cluster = OneNodeCluster(options.binaries, STATE)
    job = recovery_job(cluster.layout, options.fault or [], options.model)
    recording = Recording(cluster, job.name)
    start_seconds: dict[str, float] = {}
    try:
        start(cluster, start_seconds)
        recording.begin()
        with printed_watch(cluster.kubectl, options.out / "watch.txt", lambda: recording.seconds):
            with foreign_process(options.foreign_process):
                cluster.apply(job.manifest)
                recording.follow("plan_changed", deadline)
            recording.follow("complete", deadline)
    finally:
        write_report(cluster, job, options.foreign_process, recording, start_seconds, options.out)
    return 0 if recording.complete else 1


def start(cluster: OneNodeCluster, seconds: dict[str, float]) -> None:
    """Start the cluster and the operator; the duration of each part goes into `seconds`."""
    with timed("control plane", seconds):
        cluster.start_control_plane()
    with timed("node", seconds):
        cluster.start_node(host_pods.image())
    with timed("operator", seconds):
        cluster.install(CRDS)
        operator(cluster).start()


def operator(cluster: OneNodeCluster) -> OperatorProcess:
    """The operator outside of the cluster, with an administrator's permissions."""
    settings = {
        "trainer_image": host_pods.IMAGE,
        "trainer_image_pull_policy": "Never",
        "trainer_torch_version": torch_version(),
        "leader_election": False,
        "metrics_auth": False,
        "metrics_tls": False,
        "status_interval_seconds": 1,
        "log_format": "text",
    }
    return OperatorProcess(cluster.layout.kubeconfig, cluster.layout.logs / "operator.log", 8081, 8080, settings)


def foreign_process(leaves_gib: float | None) -> AbstractContextManager[None]:
    """Another process that leaves the job only `leaves_gib` of the GPU; no process if it is None."""
    return nullcontext() if leaves_gib is None else ballast(leave_bytes=int(leaves_gib * 2**30))


@contextmanager
def timed(part: str, seconds: dict[str, float]) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[part] = round(time.monotonic() - began, 1)
    print(f"{part}: {seconds[part]} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=Path, default=binary_directory(), help="folder of the cluster's programs")
    parser.add_argument("--out", type=Path, required=True, help="where the record goes")
    parser.add_argument("--model", help="URI of another model than job.yaml's")
    parser.add_argument(
        "--fault",
        type=Fault.parse,
        action="append",
        metavar="CLASS@PHASE:STEP",
        help="an injected fault such as ActivationSpike@update:4; repeatable",
    )
    parser.add_argument(
        "--foreign-process",
        type=float,
        metavar="GIB",
        help="GPU memory that another process leaves to the job, until the plan is first changed",
    )
    parser.add_argument("--seconds", type=float, default=330, help="stop after this time")
    sys.exit(main(parser.parse_args()))
