"""The probe in the pods of another trainer: reports why a process ran out of memory, without a change of the image.

An init container of the operator's image copies it into a volume, and PYTHONPATH leads every Python there.
"""

from __future__ import annotations

from typing import Any

from rljob_operator.objects.attempt import JobAttempt, Manifest
from rljob_operator.objects.pod_template import own_container
from rljob_operator.objects.pod_volumes import RUN_DIRECTORY

IN_OPERATOR_IMAGE = "/opt/rljob-probe"
"""Path of the probe in the operator image."""

_NAME = "rljob-probe"
_DIRECTORY = "/opt/rljob-probe"
SITE = f"{_DIRECTORY}/rljob_probe/site"
"""Directory of the probe in a container, for PYTHONPATH."""
_COPY_TO = "/probe"
_RESOURCES = {"cpu": "50m", "memory": "32Mi"}
"""Requests and limits: with equal ones, a pod can be of the class Guaranteed."""

_PATH = "PYTHONPATH"
_PATH_OF_TEMPLATE = "RLJOB_TEMPLATE_PYTHONPATH"


def add_probe(attempt: JobAttempt, pod: Manifest) -> None:
    """Add the probe to a worker pod after the merge with the template, unless the job runs RLJob's own trainer or
    disables it."""
    trainer = attempt.spec.trainer
    if trainer is None or trainer.probe == "Disabled" or not attempt.settings.probe_image:
        return
    container = own_container(pod)
    spec = pod["spec"]
    spec["volumes"] = [*spec["volumes"], {"name": _NAME, "emptyDir": {"sizeLimit": "10Mi"}}]
    spec["initContainers"] = [_copying(attempt), *spec.get("initContainers", [])]
    mount = {"name": _NAME, "mountPath": _DIRECTORY, "readOnly": True}
    container["volumeMounts"] = [*container["volumeMounts"], mount]
    container["env"] = [
        *_with_path(container["env"]),
        {"name": "RLJOB_PROBE_NOTES", "value": f"{RUN_DIRECTORY}/probe"},
    ]


def _copying(attempt: JobAttempt) -> dict[str, Any]:
    return {
        "name": _NAME,
        "image": attempt.settings.probe_image,
        "imagePullPolicy": attempt.settings.probe_image_pull_policy,
        "command": ["cp", "-r", f"{IN_OPERATOR_IMAGE}/.", _COPY_TO],
        "resources": {"requests": dict(_RESOURCES), "limits": dict(_RESOURCES)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": _NAME, "mountPath": _COPY_TO}],
    }


def _with_path(environment: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The probe first, then what the template has; no empty entry, which would be the working directory."""
    given = next((entry for entry in environment if entry["name"] == _PATH), None)
    others = [entry for entry in environment if entry["name"] != _PATH]
    if given is None or not (given.get("value") or given.get("valueFrom")):
        return [*others, {"name": _PATH, "value": SITE}]
    if given.get("value"):
        return [*others, {"name": _PATH, "value": f"{SITE}:{given['value']}"}]
    of_template = {**given, "name": _PATH_OF_TEMPLATE}
    return [*others, of_template, {"name": _PATH, "value": f"{SITE}:$({_PATH_OF_TEMPLATE})"}]
