"""Objects that the pods of a job need beside them: Service, ServiceAccount and Role, Secret, StepReport,
PersistentVolumeClaim, NetworkPolicy and ConfigMap."""

from __future__ import annotations

import json
import re
from typing import Any

from rljob_api.names import API_VERSION, GROUP
from rljob_api.quantity import byte_quantity
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


TOKEN_KEY = "token"


def build_ray_token_secret(attempt: JobAttempt, token: str) -> Manifest:
    """To be created once: all attempts of the job use the same token."""
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
    """ReadWriteMany: every pod of the job writes to it, from whatever node. It goes with the job."""
    checkpoint, settings = attempt.spec.checkpoint, attempt.settings
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": byte_quantity(checkpoint.size or settings.checkpoint_claim_bytes)}},
    }
    storage_class = checkpoint.storage_class_name or settings.checkpoint_storage_class
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": object_metadata(attempt, names.checkpoint_claim_name(attempt.name)),
        "spec": spec,
    }


def build_network_policy(attempt: JobAttempt) -> Manifest:
    """In: the job's own pods. Out: those, DNS, and HTTPS (443, 6443): the API server and sources of models.

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


MANIFEST_KEY = "job.yaml"
ATTEMPT_KEY = "attempt"
MEMORY_PLAN_KEY = "memory-plan.json"
PLAN_CHANGES_KEY = "plan-changes.json"
POLICY_ENVIRONMENT_KEY = "policy-environment.json"
ROLLOUT_ENVIRONMENT_KEY = "rollout-environment.json"

# YAML rejects these, or reads them as line ends; JSON allows them.
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def build_config_map(
    attempt: JobAttempt, policy_environment: dict[str, str] | None, rollout_environment: dict[str, str] | None
) -> Manifest:
    """Without a memory plan while there is none; the environments are None for another trainer than RLJob's own."""
    data = {MANIFEST_KEY: manifest_text(attempt), ATTEMPT_KEY: str(attempt.number)}
    if attempt.plan is not None:
        data[MEMORY_PLAN_KEY] = attempt.plan.model_dump_json(by_alias=True)
    if attempt.plan_changes:
        changes = [change.model_dump(mode="json", by_alias=True, exclude_none=True) for change in attempt.plan_changes]
        data[PLAN_CHANGES_KEY] = json.dumps(changes)
    if policy_environment is not None:
        data[POLICY_ENVIRONMENT_KEY] = json.dumps(policy_environment)
    if rollout_environment is not None:
        data[ROLLOUT_ENVIRONMENT_KEY] = json.dumps(rollout_environment)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_metadata(attempt, names.config_map_name(attempt.name)),
        "data": data,
    }


def manifest_text(attempt: JobAttempt) -> str:
    """The job as `rljob_api.manifest.load_manifest` reads it, without status. JSON, which is YAML as well: all strings
    are quoted, so none can be taken for something else."""
    job = attempt.job
    manifest = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": {"name": attempt.name, "namespace": attempt.namespace},
        "spec": job.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"
