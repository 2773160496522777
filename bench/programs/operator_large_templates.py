"""Jobs with large templates and many replicas: time to build their pods, and what other jobs and the probes notice.

    python -m bench.programs.operator_large_templates

Each job is stored in an operator that has no other work; two seconds later, a small job in another namespace.
"""

from __future__ import annotations

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from bench.harness.operator_cluster import NAMESPACE, control_plane, installed_operator, kubectl
from bench.harness.record import record
from bench.harness.samplers import MemoryWatch
from rljob_api.job import RLJob
from rljob_cluster.control_plane import ControlPlane
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.job_objects import build_job_objects
from rljob_operator.objects.strategic_merge import InvalidTemplate
from rljob_operator.settings import OperatorSettings
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.operator_process import OperatorProcess

BASE_PORT = 24300
SIZES = ((0, 1024), (480, 512), (3_400, 128), (1_500, 1024), (3_400, 1024), (45_000, 16))
"""Environment variables in the template, of 16 to 19 bytes each, and replicas."""
OBSERVED_SECONDS = 12.0
_PROBE_EVERY_SECONDS = 0.05


def main() -> None:
    rows = []
    for variables, replicas in SIZES:
        with control_plane(BASE_PORT, scheduler=False) as plane:
            rows.append(build(variables, replicas) | stored(plane, variables, replicas))
        print(rows[-1], flush=True)
    print(record("operator_large_templates", rows, "one job with a large template, and another tenant's job"))


def job(variables: int, replicas: int) -> dict[str, Any]:
    env = [{"name": f"V{number:x}"} for number in range(variables)]
    template = {"spec": {"containers": [{"env": env}]}} if variables else {}
    return manifests.job("large", policy={"replicas": replicas, "template": template})


def build(variables: int, replicas: int) -> dict[str, Any]:
    """Build all objects of the job in this process."""
    manifest = job(variables, replicas)
    parsed = RLJob.model_validate(manifest, by_alias=True, by_name=False)
    settings = OperatorSettings(trainer_image="localhost/rljob/trainer", trainer_torch_version="2.13.0")
    attempt = JobAttempt(
        parsed, settings, NAMESPACE, uid="u", number=1, plan=None, controller_placement="AnyNode", gang="Native"
    )
    began, refusal = time.perf_counter(), ""
    try:
        build_job_objects(attempt, "t")
    except InvalidTemplate as error:
        refusal = str(error)
    seconds = time.perf_counter() - began
    template_bytes = len(parsed.spec.policy.template.model_dump_json())
    return {"template_bytes": template_bytes, "replicas": replicas, "build_seconds": seconds, "refusal": refusal}


def stored(plane: ControlPlane, variables: int, replicas: int) -> dict[str, Any]:
    """Store the job, and observe the operator during that time."""
    api = ResourceClient.from_kubeconfig(plane.kubeconfig)
    kubectl(plane, "create", "namespace", "other")
    for namespace in (NAMESPACE, "other"):
        while api.find("serviceaccounts", "default", namespace) is None:
            time.sleep(0.1)
    operator = installed_operator(plane, BASE_PORT + 11)
    operator.start()
    stop = Event()
    with ThreadPoolExecutor(1) as pool, MemoryWatch({"operator": operator.process}) as memory:
        probing = pool.submit(probe, operator, stop)
        api.create("rljobs", job(variables, replicas), NAMESPACE)
        ends = time.monotonic() + OBSERVED_SECONDS
        time.sleep(2.0)
        began = time.monotonic()
        api.create("rljobs", manifests.job("small"), "other")
        while not api.get("rljobs", "small", "other").get("status", {}).get("conditions"):
            time.sleep(0.005)
        condition_seconds = time.monotonic() - began
        time.sleep(max(0.0, ends - time.monotonic()))
        stop.set()
        probe_seconds = probing.result()
    operator.stop()
    return {
        "pods": len(api.list("pods", NAMESPACE)),
        "healthz_max_seconds": max(probe_seconds),
        "other_job_condition_seconds": condition_seconds,
        "operator_peak_bytes": memory.peak_bytes["operator"],
    }


def probe(operator: OperatorProcess, stop: Event) -> list[float]:
    """Seconds of each request to /healthz. Raises an error for any other answer than 200."""
    seconds = []
    while not stop.wait(_PROBE_EVERY_SECONDS):
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.probes_port}/healthz", timeout=60) as answer:
            answer.read()
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
