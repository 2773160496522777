"""Deletion: the order in which pods are deleted, Kueue's Workloads, and the end of a deleted job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rljob_operator.names import kueue_group_name
from rljob_operator.reconcile.desired import Desired, PodDeletion
from rljob_operator.reconcile.observed import Observed, ObservedPod
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.stuck_pods import Termination
from rljob_operator.reconcile.view import JobView
from rljob_operator.settings import OperatorSettings

WITHOUT_WORKERS_SECONDS = 20
"""Grace period of a controller that has lost a worker: it cannot commit, and may need minutes to notice. Also that of a
worker whose node is unreachable, and of sidecars without their trainer, because nothing waits for them."""


def delete_before_next_attempt(
    pods: Sequence[ObservedPod], view: JobView, draft: StatusDraft, missing: Sequence[str] = ()
) -> Desired:
    """Delete pods that have to be gone before the next attempt, and report those that do not terminate."""
    termination = Termination.of(view.observed, view.settings, view.now)
    termination.report(pods, draft)
    return delete_pods(pods, termination, missing)


def delete_pods(pods: Sequence[ObservedPod], termination: Termination, missing: Sequence[str] = ()) -> Desired:
    """The deletions that are due now, and the time of the next look at pods that are being deleted."""
    deletions = next_deletions(pods, termination, missing)
    removed = {deletion.uid for deletion in deletions if deletion.grace_seconds == 0}
    return Desired(
        delete_pods=deletions,
        events=tuple(termination.removal_event(pod) for pod in pods if pod.uid in removed),
        requeue_after_seconds=termination.seconds_until_change(pods),
    )


def next_deletions(
    pods: Sequence[ObservedPod], termination: Termination, missing: Sequence[str] = ()
) -> tuple[PodDeletion, ...]:
    """Pods to delete now: the controller first, because it needs the workers to commit the current step.

    `missing`: names of pods of the attempt that are gone already. Each pod keeps the grace period of its template;
    that of a controller is shortened if it has lost a worker that it needs. Workers do not wait for a controller that
    is stuck: without it they can only exit.
    """
    controllers = [pod for pod in pods if pod.role == "controller" and not pod.ended]
    others = [pod for pod in pods if pod.role != "controller" or pod.ended]
    workers = [pod for pod in pods if pod.role != "controller" and pod.name not in termination.replaced]
    gone = set(missing) - termination.replaced
    lost_a_worker = bool(gone) or not workers or any(_is_lost(pod, termination) for pod in workers)
    shorter_grace = WITHOUT_WORKERS_SECONDS if lost_a_worker else None
    due = [(pod, shorter_grace) for pod in controllers]
    if all(termination.is_stuck(pod) for pod in controllers):
        due += [(pod, _grace_of_other(pod, termination, last=not controllers)) for pod in others]
    return tuple(
        PodDeletion(pod.name, pod.uid, grace if pod.deleting else None)
        for pod, grace in due
        if not pod.deleting or _has_longer(pod, grace)
    )


def _is_lost(pod: ObservedPod, termination: Termination) -> bool:
    return pod.ended or (termination.workers_are_harmless and termination.is_unreachable(pod))


def _grace_of_other(pod: ObservedPod, termination: Termination, *, last: bool) -> int | None:
    """None: that of its template. 0 removes the pod from the API server; only the `last` pods are removed."""
    if last and termination.may_remove(pod):
        return 0
    return WITHOUT_WORKERS_SECONDS if not pod.has_terminated and _is_lost(pod, termination) else None


def _has_longer(pod: ObservedPod, seconds: int | None) -> bool:
    return seconds is not None and (pod.deletion_grace_seconds or 0) > seconds


def uses_finalizer(settings: OperatorSettings) -> bool:
    """Jobs have the finalizer unless namespaces are listed.

    A listed namespace that is deleted takes the operator's Role in it along, in any order: the finalizers of its jobs
    could then never be removed, and would keep the namespace.
    """
    return not settings.namespaces


def finish_deletion(observed: Observed, draft: StatusDraft, settings: OperatorSettings, now: datetime) -> Desired:
    """Delete the pods of a job that is being deleted, report those that do not terminate, and then remove the
    finalizer."""
    if observed.pods and uses_finalizer(settings):
        termination = Termination.of(observed, settings, now)
        termination.report(observed.pods, draft)
        return delete_pods(observed.pods, termination)
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
