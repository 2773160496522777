"""Ownership of objects that exist under a name that a job needs."""

from __future__ import annotations

from rljob_operator.kube.errors import Unavailable
from rljob_operator.kube.resources import RLJOBS, Object
from rljob_operator.reconcile.observed import Observed


class ForeignObject(Exception):
    """An object that does not belong to the job has a name that the job needs."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name} exists and does not belong to this job: {_advice(kind)}")


class LeftBehind(Unavailable):
    """The object belongs to a deleted job of the same name, until garbage collection removes it."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name} belongs to a deleted job of this name; waiting for its garbage collection")


def require_owned(metadata: Object, kind: str, job: Observed) -> str:
    """uid of the object, which belongs to the job. Raises ForeignObject and LeftBehind."""
    owners = metadata.get("ownerReferences") or ()
    if any(owner.get("uid") == job.uid for owner in owners):
        return str(metadata["uid"])
    if any(owner.get("kind") == RLJOBS.kind and owner.get("name") == job.name for owner in owners):
        raise LeftBehind(kind, metadata["name"])
    raise ForeignObject(kind, metadata["name"])


def _advice(kind: str) -> str:
    if kind == "PersistentVolumeClaim":
        return "to use it, name it in checkpoint.volume.persistentVolumeClaim.claimName; otherwise rename the job"
    return "rename the job, or delete that object"
