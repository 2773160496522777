"""The controller pod: the Ray head and the process that drives the job. It never asks for a GPU, and sees none."""

from __future__ import annotations

from rljob_memory.allocator import NO_GPU
from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest
from rljob_operator.objects.pod_environment import job_entries, literal_entries, ray_entries
from rljob_operator.objects.pod_parts import container_frame, own_trainer, pod_frame
from rljob_operator.objects.service import RAY_PORT

REQUESTS = {"cpu": "500m", "memory": "2Gi"}
"""Ray's head, its object store apart, and one process without torch."""


def build_controller_pod(attempt: JobAttempt) -> Manifest:
    """Before the user's template, and before placement."""
    environment = [
        *job_entries(attempt, "controller", 0),
        {"name": "RLJOB_STEP_REPORT", "value": names.step_report_name(attempt.name)},
        *ray_entries(attempt),
        *literal_entries(NO_GPU),
    ]
    container = {
        **container_frame(attempt, environment, {"requests": dict(REQUESTS)}, read_only_root=True),
        **own_trainer(attempt, "controller"),
        "ports": [{"name": "ray", "containerPort": RAY_PORT, "protocol": "TCP"}],
    }
    pod = pod_frame(attempt, names.controller_pod_name(attempt.name), "controller", 0, container)
    pod["spec"]["serviceAccountName"] = names.service_account_name(attempt.name)
    pod["spec"]["automountServiceAccountToken"] = True
    return pod
