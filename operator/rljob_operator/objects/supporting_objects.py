"""Objects that the pods of a job need: Service, Secret, StepReport, PersistentVolumeClaim, NetworkPolicy, ConfigMap and
account."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.metadata import API_VERSION, GROUP, checkpoint_claim_name
from rljob_api.plan_change import PlanChange
from rljob_api.quantity import byte_quantity
from rljob_memory.planning.limits import claim_bytes
from rljob_operator import labels, names
from rljob_operator.objects.attempt import JobAttempt, Manifest, object_metadata, shared_metadata
from rljob_operator.objects.predicted_memory import predicted_memory
from rljob_operator.objects.template_checks import InvalidTemplate

RAY_PORT = 6379
RENDEZVOUS_PORT = 29500
"""torchrun's own default."""


def build_service(attempt: JobAttempt) -> Manifest:
    """The headless Service that gives the first pod of each job of the namespace an address, ready or not: the others
    join it before it is ready.

    One Service for each job would cost five writes: of the Service, and of its Endpoints and EndpointSlice, twice each.
    """
    if attempt.own_trainer:
        first, port_name, port = {labels.ROLE: "controller"}, "ray", RAY_PORT
    else:
        first, port_name, port = {labels.ROLE: "policy", labels.INDEX: "0"}, "rendezvous", RENDEZVOUS_PORT
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": shared_metadata(attempt, service_name(attempt)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {labels.MANAGED_BY: labels.MANAGED_BY_OPERATOR, **first},
            "ports": [{"name": port_name, "port": port, "targetPort": port, "protocol": "TCP"}],
        },
    }


def service_name(attempt: JobAttempt) -> str:
    return names.CONTROLLER_SERVICE if attempt.own_trainer else names.RENDEZVOUS_SERVICE


def first_pod_host(attempt: JobAttempt) -> str:
    """Address of the pod that the others join: the Ray head, or the first worker of another trainer."""
    name = attempt.name
    pod = names.controller_pod_name(name) if attempt.own_trainer else names.worker_pod_name(name, "policy", 0)
    return f"{pod}.{service_name(attempt)}.{attempt.namespace}.svc"


TOKEN_KEY = "token"


def build_ray_token_secret(attempt: JobAttempt, token: str) -> Manifest:
    """The Secret with the token of Ray, created once: all attempts of the job use the same token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_metadata(attempt, names.ray_token_secret_name(attempt.name, attempt.uid)),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: token},
    }


def build_step_report(attempt: JobAttempt) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": "StepReport",
        "metadata": object_metadata(attempt, names.step_report_name(attempt.name)),
    }


def build_checkpoint_claim(attempt: JobAttempt) -> Manifest:
    """ReadWriteMany: every pod of the job writes to it, from any node. Deleted with the job unless it is retained."""
    checkpoint, settings = attempt.spec.checkpoint, attempt.settings
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": byte_quantity(checkpoint.size or _predicted_claim_bytes(attempt))}},
    }
    storage_class = checkpoint.storage_class_name or settings.checkpoint_storage_class
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _claim_metadata(attempt),
        "spec": spec,
    }


def _predicted_claim_bytes(attempt: JobAttempt) -> int:
    prediction, default = predicted_memory(attempt.spec), attempt.settings.checkpoint_claim_bytes
    return default if prediction is None else claim_bytes(prediction.disk.total_bytes, default)


def _claim_metadata(attempt: JobAttempt) -> dict[str, Any]:
    metadata = object_metadata(attempt, checkpoint_claim_name(attempt.name))
    if attempt.spec.checkpoint.retain:
        del metadata["ownerReferences"]
        metadata["labels"] |= {labels.RETAINED: "true"}
    return metadata


_DNS_PORTS = (53, 5353)
"""Ports of the DNS Service, and of OpenShift's DNS pods behind it: network plugins compare either."""

_HTTPS_PORT = 443
"""Sources of models and data."""


def build_network_policy(attempt: JobAttempt) -> Manifest:
    """Ingress from the job's own pods; egress to these, DNS, HTTPS, the API server and destinations of the settings.

    Policies add up: one of the user's own can let more through.
    """
    own_pods = {"podSelector": {"matchLabels": {labels.JOB_UID: attempt.uid}}}
    tcp_ports = sorted({_HTTPS_PORT, *attempt.settings.api_server_ports})
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
                {"ports": [{"protocol": protocol, "port": port} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]},
                {"ports": [{"protocol": "TCP", "port": port} for port in tcp_ports]},
                *attempt.settings.network_policy_egress,
            ],
        },
    }


MANIFEST_KEY = "job.yaml"
ATTEMPT_SETTINGS_KEY = "attempt.json"

# YAML rejects these, or reads them as line ends; JSON allows them.
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def build_config_map(
    attempt: JobAttempt, policy_environment: dict[str, str] | None, rollout_environment: dict[str, str] | None
) -> Manifest:
    """The manifest and, for RLJob's own trainer, the settings of the attempt. The pods of another trainer have the plan
    themselves: they are new in every attempt."""
    data = {MANIFEST_KEY: manifest_text(attempt)}
    if attempt.own_trainer:
        settings = AttemptSettings(
            attempt=attempt.number,
            memory_plan=attempt.plan,
            plan_changes=latest_changes(attempt.plan_changes),
            policy_environment=policy_environment,
            rollout_environment=rollout_environment,
        )
        data[ATTEMPT_SETTINGS_KEY] = settings.model_dump_json(by_alias=True, exclude_none=True)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_metadata(attempt, names.config_map_name(attempt.name)),
        "data": data,
    }


_MAX_PLAN_CHANGES_BYTES = 256 << 10
"""A ConfigMap has at most 1 MiB, and the manifest may need most of it."""


def latest_changes(changes: Sequence[PlanChange]) -> list[PlanChange]:
    """The latest changes, oldest first: as many as fit into _MAX_PLAN_CHANGES_BYTES of JSON."""
    left_bytes, latest = _MAX_PLAN_CHANGES_BYTES, []
    for change in reversed(changes):
        left_bytes -= len(change.model_dump_json(by_alias=True, exclude_none=True).encode())
        if left_bytes < 0:
            break
        latest.append(change)
    return latest[::-1]


MAX_MANIFEST_BYTES = 700 << 10
"""The rest of a ConfigMap's 1 MiB is for the plan changes and the settings of the attempt."""

_INDENTED_BYTES = 8 << 10
"""Indentation makes lists that are nested 190 levels deep two hundred times as large."""


def manifest_text(attempt: JobAttempt) -> str:
    """The job as `rljob_api.manifest.load_manifest` reads it, without status. JSON, which is YAML as well: all strings
    are quoted, so none can be taken for something else. Raises InvalidTemplate if it does not fit into a ConfigMap."""
    job = attempt.job
    manifest = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": {"name": attempt.name, "namespace": attempt.namespace},
        "spec": job.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    text = _yaml(json.dumps(manifest, ensure_ascii=False))
    size_bytes = len(text.encode())
    if size_bytes > MAX_MANIFEST_BYTES:
        raise InvalidTemplate(
            f"spec: expected at most {MAX_MANIFEST_BYTES >> 10} KiB of JSON, found {math.ceil(size_bytes / 1024)} KiB; "
            "shorten the templates and engineArgs, and put long texts into a ConfigMap that the pods mount"
        )
    return _yaml(json.dumps(manifest, ensure_ascii=False, indent=2)) if size_bytes <= _INDENTED_BYTES else text


def _yaml(text: str) -> str:
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


# --- Account of the controllers ---


_RBAC_GROUP = "rbac.authorization.k8s.io"


def account_name(attempt: JobAttempt) -> str:
    """Name of the controller's ServiceAccount, of its Role, and of the RoleBinding between them."""
    shared = attempt.settings.shared_account
    return names.SHARED_ACCOUNT if shared else names.service_account_name(attempt.name)


def build_account(attempt: JobAttempt) -> list[Manifest]:
    """The ServiceAccount, its Role and the RoleBinding.

    RBAC can restrict a right to a name, but not to the name of the job whose pod asks. So there are two ways, and the
    setting `shared_account` decides between them, here alone: an account for each job, with a Role that names its
    StepReport; or one account for each namespace, with a Role for all StepReports in it, and the chart's
    ValidatingAdmissionPolicy, which ties every write to the pod that the token was issued for.
    """
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


# --- Objects of the user ---


@dataclass(frozen=True, slots=True)
class RequiredObject:
    """A ConfigMap that pods mount. Without it, the kubelet waits, and the pod's status does not show why."""

    name: str
    namespace: str
    field: str
    """Field of the job that names it."""


def required_objects(attempt: JobAttempt) -> tuple[RequiredObject, ...]:
    files = attempt.spec.task.files
    if files is None or files.config_map is None:
        return ()
    return (RequiredObject(files.config_map, attempt.namespace, "spec.task.files.configMap"),)
