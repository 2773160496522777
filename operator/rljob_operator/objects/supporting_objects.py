"""Objects that the pods of a job need: Service, Secret, StepReport, PersistentVolumeClaim, NetworkPolicy, ConfigMap,
ServiceAccount with its Role."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.metadata import API_VERSION, GROUP, checkpoint_claim_name
from rljob_api.plan_change import PlanChange
from rljob_api.quantity import byte_quantity
from rljob_memory.pod_memory import claim_bytes
from rljob_operator import labels, names
from rljob_operator.objects.attempt import JobAttempt, Manifest, job_object, object_metadata, shared_metadata
from rljob_operator.objects.strategic_merge import InvalidTemplate

RAY_PORT = 6379
METRICS_PORT = 9464
"""Below Ray's first ports in a pod, like that of its head."""

RENDEZVOUS_PORT = 29500
"""torchrun's own default."""


def applied_objects(attempt: JobAttempt, allocators: Mapping[str, dict[str, str]]) -> list[Manifest]:
    """Build the objects that follow the job and its plan. `allocators`: variables of each role."""
    objects = [_config_map(attempt, allocators), _service(attempt)]
    if attempt.own_trainer:
        objects += _account(attempt)
    if attempt.settings.network_policy:
        objects.append(_network_policy(attempt))
    return objects


def created_objects(attempt: JobAttempt, ray_token: str) -> list[Manifest]:
    """Build the objects that are created once, because others write to them: a token, a report, checkpoints."""
    objects = []
    if attempt.own_trainer:
        objects += [_ray_token_secret(attempt, ray_token), job_object(attempt, API_VERSION, "StepReport", attempt.name)]
    if attempt.spec.checkpoint.volume is None:
        objects.append(_checkpoint_claim(attempt))
    return objects


def _service(attempt: JobAttempt) -> Manifest:
    """Build the headless Service that gives the first pod of each job of the namespace an address, ready or not: the
    others join it before it is ready.

    One Service for each job would cost five writes: of the Service, and of its Endpoints and EndpointSlice, twice each.
    """
    if attempt.own_trainer:
        first, port_name, port = {labels.ROLE: "controller"}, "ray", RAY_PORT
    else:
        first, port_name, port = {labels.ROLE: "policy", labels.INDEX: "0"}, "rendezvous", RENDEZVOUS_PORT
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {labels.MANAGED_BY: labels.MANAGED_BY_OPERATOR, **first},
        "ports": [{"name": port_name, "port": port, "targetPort": port, "protocol": "TCP"}],
    }
    metadata = shared_metadata(attempt, service_name(attempt))
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def service_name(attempt: JobAttempt) -> str:
    """Return the name of the headless Service that the first pod of the job belongs to."""
    return names.CONTROLLER_SERVICE if attempt.own_trainer else names.RENDEZVOUS_SERVICE


def first_pod_host(attempt: JobAttempt) -> str:
    """Return the address of the pod that the others join: Ray's head, or the first worker of another trainer."""
    name = attempt.name
    pod = names.controller_pod_name(name) if attempt.own_trainer else names.worker_pod_name(name, "policy", 0)
    return f"{pod}.{service_name(attempt)}.{attempt.namespace}.svc"


TOKEN_KEY = "token"


def _ray_token_secret(attempt: JobAttempt, token: str) -> Manifest:
    """The token of Ray: all attempts of the job use the same."""
    fields = {"type": "Opaque", "immutable": True, "stringData": {TOKEN_KEY: token}}
    return job_object(attempt, "v1", "Secret", names.ray_token_secret_name(attempt.name, attempt.uid), **fields)


def _checkpoint_claim(attempt: JobAttempt) -> Manifest:
    """Deleted with the job unless it is retained. ReadWriteMany: every pod of the job writes to it, from any node."""
    checkpoint, settings = attempt.spec.checkpoint, attempt.settings
    size_bytes = checkpoint.size or settings.checkpoint_claim_bytes
    if checkpoint.size is None and attempt.prediction is not None:
        size_bytes = claim_bytes(attempt.prediction.peak("disk"), settings.checkpoint_claim_bytes)
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": byte_quantity(size_bytes)}},
    }
    storage_class = checkpoint.storage_class_name or settings.checkpoint_storage_class
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    claim = job_object(attempt, "v1", "PersistentVolumeClaim", checkpoint_claim_name(attempt.name), spec=spec)
    if checkpoint.retain:
        del claim["metadata"]["ownerReferences"]
        claim["metadata"]["labels"] |= {labels.RETAINED: "true"}
    return claim


_DNS_PORTS = (53, 5353)
"""Ports of the DNS Service, and of OpenShift's DNS pods behind it: network plugins compare either."""

_HTTPS_PORT = 443
"""Sources of models and data."""


def _network_policy(attempt: JobAttempt) -> Manifest:
    """Ingress from the job's own pods, and to its metrics; egress to the pods, DNS, HTTPS, the API server and
    destinations of the settings.

    Policies add up: one of the user's own can let more through.
    """
    own_pods = {"podSelector": {"matchLabels": {labels.JOB_UID: attempt.uid}}}
    tcp_ports = sorted({_HTTPS_PORT, *attempt.settings.api_server_ports})
    ingress: list[Manifest] = [{"from": [own_pods]}]
    if attempt.serves_metrics:
        peers = attempt.settings.job_metrics_from
        metrics = {"ports": [{"protocol": "TCP", "port": METRICS_PORT}]}
        ingress.append(metrics | ({"from": list(peers)} if peers else {}))
    spec = {
        **own_pods,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [
            {"to": [own_pods]},
            {"ports": [{"protocol": protocol, "port": port} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]},
            {"ports": [{"protocol": "TCP", "port": port} for port in tcp_ports]},
            *attempt.settings.network_policy_egress,
        ],
    }
    return job_object(attempt, "networking.k8s.io/v1", "NetworkPolicy", names.object_name(attempt.name), spec=spec)


MANIFEST_KEY = "job.yaml"
ATTEMPT_SETTINGS_KEY = "attempt.json"

# YAML rejects these, or reads them as line ends; JSON allows them.
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def _config_map(attempt: JobAttempt, allocators: Mapping[str, dict[str, str]]) -> Manifest:
    """The manifest and, for RLJob's own trainer, the settings of the attempt. The pods of
    another trainer have the plan themselves: they are new in every attempt."""
    data = {MANIFEST_KEY: manifest_text(attempt)}
    if attempt.own_trainer:
        settings = AttemptSettings(
            attempt=attempt.number,
            memory_plan=attempt.plan,
            memory_profile=attempt.memory_profile,
            plan_changes=latest_changes(attempt.plan_changes),
            policy_environment=allocators["policy"],
            rollout_environment=allocators["rollout"],
        )
        data[ATTEMPT_SETTINGS_KEY] = settings.model_dump_json(by_alias=True, exclude_none=True)
    return job_object(attempt, "v1", "ConfigMap", names.object_name(attempt.name), data=data)


_MAX_PLAN_CHANGES_BYTES = 256 << 10
"""A ConfigMap has at most 1 MiB, and the manifest may need most of it."""


def latest_changes(changes: Sequence[PlanChange]) -> list[PlanChange]:
    """Return the latest changes, oldest first: as many as fit into _MAX_PLAN_CHANGES_BYTES of JSON."""
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
    """Return the job as `rljob_api.manifest.load_manifest` reads it, without status. JSON, which is YAML as well: all
    strings are quoted, so none has another type. Raises InvalidTemplate if it is too large for a ConfigMap."""
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
    """Return the name of the controller's ServiceAccount, of its Role, and of the RoleBinding between them."""
    return names.SHARED_ACCOUNT if attempt.settings.shared_account else names.object_name(attempt.name)


def _account(attempt: JobAttempt) -> list[Manifest]:
    """The ServiceAccount, its Role and the RoleBinding.

    RBAC can restrict a right to a name, but not to the name of the job whose pod asks. The setting `shared_account`
    therefore decides between two methods, here alone: an account for each job, with a Role that names its StepReport;
    or one account for each namespace, with a Role for all StepReports in it, and the chart's
    ValidatingAdmissionPolicy, which ties every write to the pod that the token was issued for.
    """
    name, shared = account_name(attempt), attempt.settings.shared_account
    metadata = shared_metadata(attempt, name) if shared else object_metadata(attempt, name)
    # Writes of the status alone: metadata, such as finalizers and owner, stay the operator's.
    rule: dict[str, Any] = {"apiGroups": [GROUP], "resources": ["stepreports/status"], "verbs": ["patch"]}
    if not shared:
        rule["resourceNames"] = [attempt.name]
    return [
        # Only the controller pod asks for a token.
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata, "automountServiceAccountToken": False},
        {"apiVersion": f"{_RBAC_GROUP}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]},
        {
            "apiVersion": f"{_RBAC_GROUP}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _RBAC_GROUP, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": attempt.namespace}],
        },
    ]
