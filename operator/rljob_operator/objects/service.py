"""The headless Service in front of the pod that the others look for: the Ray head, or policy-0 of another trainer."""

from __future__ import annotations

from rljob_operator import labels, names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest, object_metadata

RAY_PORT = 6379
RENDEZVOUS_PORT = 29500
"""torchrun's own default."""


def build_service(attempt: JobAttempt) -> Manifest:
    """Ready or not, the pod has its address: the others must join it before it can get ready."""
    if attempt.own_trainer:
        first, port_name, port = {labels.ROLE: "controller"}, "ray", RAY_PORT
    else:
        first, port_name, port = {labels.ROLE: "policy", labels.INDEX: "0"}, "rendezvous", RENDEZVOUS_PORT
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_metadata(attempt, names.service_name(attempt.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {labels.JOB_UID: attempt.uid, **first},
            "ports": [{"name": port_name, "port": port, "targetPort": port, "protocol": "TCP"}],
        },
    }


def service_host(attempt: JobAttempt) -> str:
    return f"{names.service_name(attempt.name)}.{attempt.namespace}.svc"
