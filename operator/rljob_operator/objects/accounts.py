"""Identity and rights of the controllers: they may write the status of their own StepReport, and nothing else.

RBAC can restrict a right to a name, but not to the name of the job whose pod asks. So there are two ways, and the
setting `shared_account` decides between them, here alone: an account for each job, with a Role that names its
StepReport; or one account for each namespace, with a Role for all StepReports in it, and the chart's
ValidatingAdmissionPolicy, which ties every write to the pod that the token was issued for.
"""

from __future__ import annotations

from typing import Any

from rljob_api.metadata import GROUP
from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest, object_metadata, shared_metadata

_RBAC_GROUP = "rbac.authorization.k8s.io"


def account_name(attempt: JobAttempt) -> str:
    """Name of the controller's ServiceAccount, of its Role, and of the RoleBinding between them."""
    shared = attempt.settings.shared_account
    return names.SHARED_ACCOUNT if shared else names.service_account_name(attempt.name)


def build_account(attempt: JobAttempt) -> list[Manifest]:
    """The ServiceAccount, its Role and the RoleBinding."""
    name = account_name(attempt)
    shared = attempt.settings.shared_account
    metadata = shared_metadata(attempt, name) if shared else object_metadata(attempt, name)
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata,
            # No pod gets its token unasked; the controller pod asks.
            "automountServiceAccountToken": False,
        },
        {"apiVersion": f"{_RBAC_GROUP}/v1", "kind": "Role", "metadata": metadata, "rules": [_rule(attempt)]},
        {
            "apiVersion": f"{_RBAC_GROUP}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _RBAC_GROUP, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": attempt.namespace}],
        },
    ]


def _rule(attempt: JobAttempt) -> dict[str, Any]:
    """Writes of the status, which answer with the StepReport: metadata stay the operator's, finalizers and owner
    included."""
    rule = {"apiGroups": [GROUP], "resources": ["stepreports/status"], "verbs": ["patch"]}
    if attempt.settings.shared_account:
        return rule
    return rule | {"resourceNames": [names.step_report_name(attempt.name)]}
