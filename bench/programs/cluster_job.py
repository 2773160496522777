"""Times from `kubectl apply` of examples/digits.yaml to its first step and its end, on this machine's cluster.

make demo-cluster && .venv/bin/python -m bench.programs.cluster_job
"""

from __future__ import annotations

import json
import subprocess
import time
from datetime import datetime
from typing import Any

from bench.harness.record import record
from rljob_cluster.layout import ClusterLayout
from rljob_testing.repository import EXAMPLES

EXAMPLE = EXAMPLES / "digits.yaml"
NAMESPACE = "bench"
RUNS = 3
_LOOK_SECONDS = 0.05

Object = dict[str, Any]


def main() -> None:
    kubectl("create", "namespace", NAMESPACE, check=False)
    rows = [measure() for _ in range(RUNS)]
    print(record("cluster_job", rows, "examples/digits.yaml in pods on two kubelets of one machine; images are there"))


def measure() -> Object:
    began = time.time()
    kubectl("apply", "-f", str(EXAMPLE))
    pods = until(lambda: pods_of_job() if len(pods_of_job()) == 2 else None)
    created = max(moment(pod["metadata"]["creationTimestamp"]) for pod in pods)
    until(lambda: ((get("stepreport") or {}).get("status") or {}).get("step"))
    first_step = time.time()
    job = until(lambda: job if (job := get("rljob")) and completed_at(job) else None)
    containers = [pod["status"]["containerStatuses"][0]["state"] for pod in pods_of_job()]
    started = [moment((state.get("running") or state["terminated"])["startedAt"]) for state in containers]
    kubectl("delete", "rljob", "digits")
    return {
        "pods_created_seconds": max(0.0, created - began),
        "containers_started_seconds": max(0.0, max(started) - began),
        "first_step_seconds": first_step - began,
        "complete_seconds": moment(completed_at(job)) - began,
        "reward": job["status"]["reward"],
    }


def kubectl(*words: str, check: bool = True) -> str:
    layout = ClusterLayout.default()
    program = [str(layout.binaries / "kubectl"), f"--kubeconfig={layout.kubeconfig}", f"--namespace={NAMESPACE}"]
    return subprocess.run([*program, *words], check=check, capture_output=True, text=True).stdout


def get(kind: str) -> Object:
    found: Object = json.loads(kubectl("get", kind, "digits", "-o", "json", "--ignore-not-found") or "{}")
    return found


def pods_of_job() -> list[Object]:
    pods: list[Object] = json.loads(kubectl("get", "pods", "-o", "json", "-l", "rljob.dev/job-name=digits"))["items"]
    return pods


def completed_at(job: Object) -> str:
    conditions = job.get("status", {}).get("conditions", [])
    return next((c["lastTransitionTime"] for c in conditions if c["type"] == "Complete" and c["status"] == "True"), "")


def until(look: Any) -> Any:
    while not (found := look()):
        time.sleep(_LOOK_SECONDS)
    return found


def moment(timestamp: str) -> float:
    """Kubernetes stores whole seconds, so the result may be up to one second too small."""
    return datetime.fromisoformat(timestamp).timestamp()


if __name__ == "__main__":
    main()
