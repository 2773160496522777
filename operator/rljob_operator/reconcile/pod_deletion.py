"""Deletion: the order in which pods are deleted, Kueue's Workloads, and the end of a deleted job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rljob_operator.names import kueue_group_name
from rljob_operator.reconcile.desired import Desired, PodDeletion
from rljob_operator.reconcile.observed import Observed, ObservedPod
from rljob_operator.settings import OperatorSettings

WITHOUT_WORKERS_SECONDS = 20
"""Grace period of a controller that has lost a worker: it cannot commit, and may need minutes to notice."""


def next_deletions(pods: Sequence[ObservedPod], missing: Sequence[str] = ()) -> tuple[PodDeletion, ...]:
    """Pods to delete now: the controller first, because it needs the workers to commit the current step.

    `missing`: names of pods of the attempt that are gone already. Each pod keeps the grace period of its template;
    that of a controller is shortened if a worker is lost.
    """
    controllers = [pod for pod in pods if pod.role == "controller" and not pod.ended]
    if not controllers:
        return tuple(PodDeletion(pod.name, pod.uid) for pod in pods if not pod.deleting)
    shorter_grace = WITHOUT_WORKERS_SECONDS if missing or _lost_a_worker(pods) else None
    return tuple(
        PodDeletion(pod.name, pod.uid, shorter_grace if pod.deleting else None)
        for pod in controllers
        if not pod.deleting or _has_longer(pod, shorter_grace)
    )


def _lost_a_worker(pods: Sequence[ObservedPod]) -> bool:
    workers = [pod for pod in pods if pod.role != "controller"]
    return not workers or any(pod.ended for pod in workers)


def _has_longer(pod: ObservedPod, seconds: int | None) -> bool:
    return seconds is not None and (pod.deletion_grace_seconds or 0) > seconds


def uses_finalizer(settings: OperatorSettings) -> bool:
    """Jobs have the finalizer unless namespaces are listed.

    A listed namespace that is deleted takes the operator's Role in it along, in any order: the finalizers of its jobs
    could then never be removed, and would keep the namespace.
    """
    return not settings.namespaces


def finish_deletion(observed: Observed, settings: OperatorSettings) -> Desired:
    """Delete the pods of a job that is being deleted, and then remove the finalizer."""
    if observed.pods and uses_finalizer(settings):
        return Desired(delete_pods=next_deletions(observed.pods))
    return Desired(finalizer=False) if observed.has_finalizer else Desired()


def workloads_to_delete(observed: Observed) -> tuple[str, ...]:
    """Workloads of attempts whose pods are being deleted while they wait for Kueue's admission.

    Kueue keeps a finalizer on the pods of a group until the group has finished or the Workload is deleted:
    https://kueue.sigs.k8s.io/docs/tasks/troubleshooting/troubleshooting_pods/
    """
    return waiting_workloads(observed.name, observed.pods) if observed.kueue_installed else ()


def waiting_workloads(job: str, pods: Iterable[ObservedPod]) -> tuple[str, ...]:
    """Names of the Workloads of those of `pods` that are being deleted while they wait for admission."""
    attempts = {pod.attempt for pod in pods if pod.deleting and pod.gated}
    return tuple(kueue_group_name(job, attempt) for attempt in sorted(attempts))
