"""Parts that the pods of all roles share, including the security context of Pod Security `restricted`."""

from __future__ import annotations

from typing import Any

from rljob_api.exit_codes import ExitCode
from rljob_api.status import Role
from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import object_metadata, pod_labels
from rljob_operator.objects.pod_volumes import RUN_DIRECTORY, pod_volumes
from rljob_operator.objects.user_environment import env_from, with_user_entries

CONTAINER = "rljob"

RESTART_ALL_CONTAINERS = "RestartAllContainers"
"""Action of a restart rule: the pod stays on its node, and all its containers are restarted."""

_RESTART_IN_PLACE = {
    "action": RESTART_ALL_CONTAINERS,
    "exitCodes": {"operator": "In", "values": [int(ExitCode.RESTART_IN_PLACE)]},
}


def pod_frame(attempt: JobAttempt, name: str, role: Role, container: dict[str, Any]) -> dict[str, Any]:
    """The first pod of a role, with one container and no restart policy: the operator decides what follows its
    termination."""
    volumes, _ = pod_volumes(attempt, role)
    user = attempt.settings.run_as_user
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": attempt.settings.termination_grace_seconds,
        "hostname": name,
        "subdomain": names.service_name(attempt.name),
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup") if user else (), user),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if attempt.settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in attempt.settings.image_pull_secrets]
    metadata = object_metadata(attempt, name, role) | {
        "labels": pod_labels(attempt, role),
        "annotations": {"kubectl.kubernetes.io/default-container": CONTAINER},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def container_frame(
    attempt: JobAttempt,
    role: Role,
    environment: list[dict[str, Any]],
    resources: dict[str, Any],
    *,
    read_only_root: bool,
) -> dict[str, Any]:
    """The container `rljob` without its image and command."""
    _, mounts = pod_volumes(attempt, role)
    return {
        "name": CONTAINER,
        "env": with_user_entries(environment, attempt.spec),
        **env_from(attempt.spec),
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": read_only_root,
        },
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "volumeMounts": mounts,
    }


def own_trainer(attempt: JobAttempt, command: str) -> dict[str, Any]:
    """Image, command, readiness probe and restart rule of a container of RLJob's own trainer."""
    in_place = (
        {"restartPolicy": "Never", "restartPolicyRules": [_RESTART_IN_PLACE]} if attempt.restarts_in_place else {}
    )
    return {
        **in_place,
        "image": attempt.settings.trainer_image,
        "imagePullPolicy": attempt.settings.trainer_image_pull_policy,
        "command": ["rljob", command],
        "readinessProbe": {
            "exec": {"command": ["test", "-e", f"{RUN_DIRECTORY}/ready"]},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
    }
