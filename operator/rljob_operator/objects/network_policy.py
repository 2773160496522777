"""The NetworkPolicy of a job, where the installation wants one: the job's pods among themselves."""

from __future__ import annotations

from rljob_operator import labels, names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest, object_metadata


def build_network_policy(attempt: JobAttempt) -> Manifest:
    """In: the job's own pods. Out: those, DNS, and HTTPS (443, 6443): the API server and where models come from.

    Policies add up: one of the user's own can let more through.
    """
    own_pods = {"podSelector": {"matchLabels": {labels.JOB_UID: attempt.uid}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_metadata(attempt, names.network_policy_name(attempt.name)),
        "spec": {
            "podSelector": own_pods["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [own_pods]}],
            "egress": [
                {"to": [own_pods]},
                {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]},
                {"ports": [{"protocol": "TCP", "port": port} for port in (443, 6443)]},
            ],
        },
    }
