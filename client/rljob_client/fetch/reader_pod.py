"""The pod that reads the volume of a job. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rljob_api.checkpoint import CheckpointSpec

Object = dict[str, Any]

CONTAINER = "fetch"
MOUNT = "/run-files"
_LIFETIME_SECONDS = 6 * 3600
"""The pod ends after this time even if nobody deletes it."""
_USER = 10001
"""The user of RLJob's images, which owns the files."""
_COPIED_FROM_SPEC = ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "securityContext")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run in a cluster."""

    job: str

    volume: Object
    """Kubernetes volume source."""

    directory: str
    """Directory of the run on the volume; empty for its root."""

    @classmethod
    def of(cls, job: str, checkpoint: CheckpointSpec) -> RunFiles:
        """The files of a job with this `spec.checkpoint`."""
        return cls(job, checkpoint.volume_source(job), checkpoint.directory(job))

    @property
    def mounted(self) -> str:
        """Path of the run's directory in the reader pod."""
        return f"{MOUNT}/{self.directory}".rstrip("/")


def reader_pod(files: RunFiles, name: str, image: str, model_pod: Object | None) -> Object:
    """A pod of Pod Security `restricted` with the volume of the run, read-only.

    `image`: any with tar and sleep. `model_pod`: a pod of the job, whose placement and security context are copied.
    """
    spec: Object = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _LIFETIME_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    copied = model_pod["spec"] if model_pod else {}
    spec |= {field: copied[field] for field in _COPIED_FROM_SPEC if field in copied}
    spec["containers"] = [
        {
            "name": CONTAINER,
            "image": image,
            "command": ["sleep", str(_LIFETIME_SECONDS)],
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "volumeMounts": [{"name": "run", "mountPath": MOUNT, "readOnly": True}],
        }
    ]
    spec["volumes"] = [{"name": "run", **files.volume}]
    labels = {"app.kubernetes.io/name": "rljob-fetch"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def image_of(pod: Object) -> str:
    """Image of the container `rljob` of a pod of a job."""
    return next(str(c["image"]) for c in pod["spec"]["containers"] if c["name"] == "rljob")


def start_obstacle(pod: Object) -> str | None:
    """Reason why the pod does not start; None if it may start soon."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("reason") == "Unschedulable":
            return str(condition.get("message"))
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".removesuffix(": ")
    return None


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
