"""Who the controller pod is to the API server: one that can get and patch its own StepReport, get its own RLJob, and
nothing else."""

from __future__ import annotations

from rljob_api.names import GROUP
from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest, object_metadata

_RBAC_GROUP = "rbac.authorization.k8s.io"


def build_service_account(attempt: JobAttempt) -> Manifest:
    """No pod gets its token unasked; the controller pod asks."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": object_metadata(attempt, names.service_account_name(attempt.name)),
        "automountServiceAccountToken": False,
    }


def build_role(attempt: JobAttempt) -> Manifest:
    return {
        "apiVersion": f"{_RBAC_GROUP}/v1",
        "kind": "Role",
        "metadata": object_metadata(attempt, names.service_account_name(attempt.name)),
        "rules": [
            {
                "apiGroups": [GROUP],
                "resources": ["stepreports"],
                "resourceNames": [names.step_report_name(attempt.name)],
                "verbs": ["get", "patch"],
            },
            {
                "apiGroups": [GROUP],
                "resources": ["rljobs"],
                "resourceNames": [attempt.name],
                "verbs": ["get"],
            },
        ],
    }


def build_role_binding(attempt: JobAttempt) -> Manifest:
    name = names.service_account_name(attempt.name)
    return {
        "apiVersion": f"{_RBAC_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": object_metadata(attempt, name),
        "roleRef": {"apiGroup": _RBAC_GROUP, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": attempt.namespace}],
    }
