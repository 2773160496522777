"""Ownership of objects that exist under a name that a job needs."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_operator import labels
from rljob_operator.kube.errors import Unavailable
from rljob_operator.kube.resources import RLJOBS, Object
from rljob_operator.reconcile.observed import Observed


class ForeignObject(Exception):
    """An object that does not belong to the job has a name that the job needs."""

    def __init__(self, kind: str, name: str, advice: str | None = None) -> None:
        super().__init__(f"{kind} {name} exists and does not belong to this job: {advice or _advice(kind)}")


class LeftBehind(Unavailable):
    """The object belongs to a deleted job of the same name, until garbage collection removes it."""

    def __init__(self, kind: str, name: str, finalizers: Sequence[str] = ()) -> None:
        kept = f", which its finalizers prevent: {', '.join(finalizers)}" if finalizers else ""
        super().__init__(
            f"{kind} {name} belongs to a deleted job of this name; waiting for its garbage collection{kept}"
        )


def require_owned(metadata: Object, kind: str, job: Observed) -> str:
    """uid of the object, which belongs to the job. Raises ForeignObject and LeftBehind."""
    owners = metadata.get("ownerReferences") or ()
    marks = metadata.get("labels") or {}
    is_retained = kind == "PersistentVolumeClaim" and not owners and labels.RETAINED in marks
    if any(owner.get("uid") == job.uid for owner in owners) or (is_retained and marks.get(labels.JOB_UID) == job.uid):
        return str(metadata["uid"])
    if any(belonged_to(owner, job) for owner in owners):
        raise LeftBehind(kind, metadata["name"], metadata.get("finalizers") or ())
    if is_retained and marks.get(labels.JOB_NAME) == job.name:
        raise ForeignObject(kind, metadata["name"], _resume_advice(metadata["name"]))
    raise ForeignObject(kind, metadata["name"])


def require_shared(metadata: Object, kind: str) -> str:
    """uid of the object, which the operator has made for all jobs of its namespace. Raises ForeignObject."""
    marks = metadata.get("labels") or {}
    made_by_operator = marks.get(labels.MANAGED_BY) == labels.MANAGED_BY_OPERATOR and labels.SHARED in marks
    if not made_by_operator or metadata.get("ownerReferences"):
        advice = "every job of the namespace needs that name; delete or rename that object"
        raise ForeignObject(kind, metadata["name"], advice)
    return str(metadata["uid"])


def belonged_to(owner: Object, job: Observed) -> bool:
    """The owner is a job of this name, which is not this one."""
    return owner.get("kind") == RLJOBS.kind and owner.get("name") == job.name and owner.get("uid") != job.uid


def _advice(kind: str) -> str:
    if kind == "PersistentVolumeClaim":
        return (
            "to use it, delete the job and create it again with checkpoint.volume.persistentVolumeClaim.claimName; "
            "otherwise rename the job"
        )
    return "rename the job, or delete that object"


def _resume_advice(claim: str) -> str:
    """Advice about a claim that an earlier job of the same name has left, as it was asked to."""
    return (
        "it has the checkpoints of an earlier job of this name; to resume from them, create the job with checkpoint: "
        f"{{volume: {{persistentVolumeClaim: {{claimName: {claim}}}}}}}; otherwise delete the claim, or rename the job"
    )
