"""Deletion: the order in which pods are deleted, Kueue's Workloads, deleted jobs, and pods that do not terminate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.events import EventNote, EventReason
from rljob_operator.names import kueue_group_name
from rljob_operator.reconcile.desired import Desired, PodDeletion
from rljob_operator.reconcile.observed import ObservedJob, ObservedNode, ObservedPod
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.timers import utc_text
from rljob_operator.reconcile.view import JobView, and_more
from rljob_operator.settings import OperatorSettings

WITHOUT_WORKERS_SECONDS = 20
"""Grace period of a controller that has lost a worker: it cannot commit, and may need minutes to notice. Also that of a
worker whose node is unreachable, and of sidecars without their trainer, because nothing waits for them."""
STUCK_SECONDS = 60.0
"""Seconds that a kubelet has after the grace period to kill remaining processes and to unmount volumes."""
_CHECK_SECONDS = 60.0


def delete_before_next_attempt(
    pods: Sequence[ObservedPod], view: JobView, draft: StatusDraft, missing: Sequence[str] = ()
) -> Desired:
    """Delete pods that have to be gone before the next attempt, and report those that do not terminate."""
    termination = Termination.of(view.observed, view.settings, view.now)
    termination.report(pods, draft)
    return _delete(pods, termination, missing)


def delete_pods(pods: Sequence[ObservedPod], view: JobView) -> Desired:
    """Return the deletions that are due now, and the time of the next check of pods that are being deleted."""
    return _delete(pods, Termination.of(view.observed, view.settings, view.now))


def _delete(pods: Sequence[ObservedPod], termination: Termination, missing: Sequence[str] = ()) -> Desired:
    deletions = _due_deletions(pods, termination, missing)
    removed = {deletion.uid for deletion in deletions if deletion.grace_seconds == 0}
    return Desired(
        delete_pods=deletions,
        events=tuple(termination.removal_event(pod) for pod in pods if pod.uid in removed),
        requeue_after_seconds=termination.seconds_until_change(pods),
    )


def _due_deletions(
    pods: Sequence[ObservedPod], termination: Termination, missing: Sequence[str]
) -> tuple[PodDeletion, ...]:
    """Return the pods to delete now: the controller first, because it needs the workers to commit the current step.

    `missing`: names of pods of the attempt that are gone already. Each pod keeps the grace period of its template;
    that of a controller is shortened if it has lost a worker that it needs. Workers do not wait for a controller that
    is stuck: without it they can only exit.
    """
    controllers = [pod for pod in pods if pod.role == "controller" and not pod.ended]
    others = [pod for pod in pods if pod.role != "controller" or pod.ended]
    workers = [pod for pod in pods if pod.role != "controller" and pod.name not in termination.replaced]
    gone = set(missing) - termination.replaced
    lost_a_worker = bool(gone) or not workers or any(termination.is_lost(pod) for pod in workers)
    due = [(pod, WITHOUT_WORKERS_SECONDS if lost_a_worker else None) for pod in controllers]
    if all(termination.is_stuck(pod) for pod in controllers):
        for pod in others:
            if not controllers and termination.is_due(termination.removal_due_at(pod)):
                due.append((pod, 0))  # removes the pod from the API server
            else:
                lost = termination.is_lost(pod) and not pod.has_terminated
                due.append((pod, WITHOUT_WORKERS_SECONDS if lost else None))
    return tuple(
        PodDeletion(pod.name, pod.uid, grace if pod.deleting else None)
        for pod, grace in due
        if not pod.deleting or (grace is not None and (pod.deletion_grace_seconds or 0) > grace)
    )


# --- Deleted jobs, and Kueue ---


def uses_finalizer(settings: OperatorSettings) -> bool:
    """Return True if jobs have the finalizer: unless namespaces are listed.

    A listed namespace that is deleted takes the operator's Role in it along, in any order: the finalizers of its jobs
    could then never be removed, and would keep the namespace.
    """
    return not settings.namespaces


def finish_deletion(observed: ObservedJob, draft: StatusDraft, settings: OperatorSettings, now: datetime) -> Desired:
    """Delete the pods of a job that is being deleted, report those that do not terminate, and then remove the
    finalizer."""
    if observed.pods and uses_finalizer(settings):
        termination = Termination.of(observed, settings, now)
        termination.report(observed.pods, draft)
        return _delete(observed.pods, termination)
    return Desired(finalizer=False) if observed.has_finalizer else Desired()


def workloads_to_delete(observed: ObservedJob) -> tuple[str, ...]:
    """Return the Workloads of attempts whose pods are being deleted while they wait for Kueue's admission.

    Kueue keeps a finalizer on the pods of a group until the group has finished or the Workload is deleted:
    https://kueue.sigs.k8s.io/docs/tasks/troubleshooting/troubleshooting_pods/
    """
    return waiting_workloads(observed.name, observed.pods) if observed.kueue_installed else ()


def waiting_workloads(job: str, pods: Iterable[ObservedPod]) -> tuple[str, ...]:
    """Return the names of the Workloads of those of `pods` that are being deleted while they wait for admission."""
    attempts = {pod.attempt for pod in pods if pod.deleting and pod.gated}
    return tuple(kueue_group_name(job, attempt) for attempt in sorted(attempts))


# --- Pods that do not terminate ---


@dataclass(frozen=True, slots=True)
class Termination:
    """The termination of a job's pods, as far as their nodes are known.

    Only the kubelet of a node knows that the processes of a pod have ended. Until it reports that, or a person
    removes the Node or taints it out of service, Kubernetes keeps the pod. The operator removes a pod by force only
    if its processes can do no harm if they still run:

    - A worker writes only logs, files in directories of its attempt that no other one reads, and the file of compiled
      code, which it replaces as a whole. It exits by itself soon after its controller (`HEAD_GONE_SECONDS`), and the
      next attempt has another Ray cluster.
    - A controller commits steps. Only the lock on the volume, which some file systems do not support, keeps a second
      one out.
    - The writes of another trainer are unknown.

    https://kubernetes.io/docs/concepts/cluster-administration/node-shutdown/#non-graceful-node-shutdown
    """

    nodes: dict[str, ObservedNode]
    namespace: str
    own_trainer: bool
    lost_node_seconds: float
    replaced: frozenset[str]
    """Names of the rollout pods that the controller works without."""
    now: datetime

    @classmethod
    def of(cls, observed: ObservedJob, settings: OperatorSettings, now: datetime) -> Termination:
        attempts = observed.status.attempts
        return cls(
            nodes={node.name: node for node in observed.nodes},
            namespace=observed.namespace,
            own_trainer=observed.job is not None and observed.job.spec.trainer is None,
            lost_node_seconds=settings.lost_node_seconds,
            replaced=frozenset(attempts[-1].replacing_pods if attempts else ()),
            now=now,
        )

    # --- times ---

    def _unreachable_since(self, pod: ObservedPod) -> datetime | None:
        node = self.nodes.get(pod.node) if pod.node else None
        return node.unreachable_since if node else None

    def _stuck_at(self, pod: ObservedPod) -> datetime | None:
        """Return the time at which the pod should have terminated; None if it is not being deleted."""
        if not pod.deleting or pod.deletion_due_at is None:
            return None
        return pod.deletion_due_at + timedelta(seconds=STUCK_SECONDS)

    def removal_due_at(self, pod: ObservedPod) -> datetime | None:
        """Return the time at which the pod may be removed by force; None if it must not be, or was, and a
        finalizer keeps it."""
        since, stuck_at = self._unreachable_since(pod), self._stuck_at(pod)
        harmless = pod.ended or (self.own_trainer and pod.role != "controller")
        if since is None or stuck_at is None or pod.deletion_due_at is None or pod.deletion_grace_seconds == 0:
            return None
        if not harmless or not self.lost_node_seconds:
            return None
        return max(stuck_at, max(since, pod.deletion_due_at) + timedelta(seconds=self.lost_node_seconds))

    def is_due(self, time: datetime | None) -> bool:
        return time is not None and time <= self.now

    def is_stuck(self, pod: ObservedPod) -> bool:
        return self.is_due(self._stuck_at(pod))

    def is_lost(self, pod: ObservedPod) -> bool:
        """Return True for a pod of no use to its controller: it has ended, or its node is unreachable."""
        return pod.ended or (self.own_trainer and self._unreachable_since(pod) is not None)

    def seconds_until_change(self, pods: Iterable[ObservedPod]) -> float | None:
        """Return the seconds until one of the pods is stuck, or may be removed; until the next check of a stuck one."""
        times = [time for pod in pods for time in (self._stuck_at(pod), self.removal_due_at(pod))]
        ahead = [(time - self.now).total_seconds() for time in times if time is not None and time > self.now]
        if any(self.is_stuck(pod) for pod in pods):
            ahead.append(_CHECK_SECONDS)  # its node may become unreachable
        return min(ahead, default=None)

    # --- reports ---

    def report(self, pods: Sequence[ObservedPod], draft: StatusDraft) -> None:
        """Set the condition Scheduled if one of the pods keeps the next attempt from starting."""
        stuck = [pod for pod in pods if self.is_stuck(pod)]
        if not stuck:
            return
        # A pod that needs a person first: the others need none.
        pod = min(stuck, key=lambda pod: (self.removal_due_at(pod) is not None, pod.role != "controller", pod.name))
        removal = self.removal_due_at(pod)
        assert pod.deletion_due_at is not None
        problem = (
            f"pod {pod.name}{and_more(stuck)} should have terminated by {utc_text(pod.deletion_due_at)} and has not; "
            f"{self._state_of_node(pod)}"
        )
        if removal is None:
            reason, message = ConditionReason.POD_NOT_TERMINATING, f"{problem}. {self._advice(pod)}"
        else:
            reason = ConditionReason.NODE_LOST
            message = (
                f"{problem}; the operator removes the pod at {utc_text(removal)}, and the job continues without it"
            )
        draft.condition(ConditionType.SCHEDULED, False, reason, message)

    def removal_event(self, pod: ObservedPod) -> EventNote:
        """Return the Event about the removal of a pod by force."""
        message = f"removed pod {pod.name} without an answer of its kubelet: {self._state_of_node(pod)}"
        return EventNote("Warning", EventReason.POD_REMOVED.value, message)

    def _state_of_node(self, pod: ObservedPod) -> str:
        if pod.node is None:
            return "it has no node"
        since = self._unreachable_since(pod)
        if since is not None:
            return f"its node {pod.node} has been unreachable since {utc_text(since)}"
        if pod.node in self.nodes:
            return f"the kubelet of its node {pod.node} reports"
        return f"its node {pod.node} no longer exists" if self.nodes else f"its node is {pod.node}"

    def _advice(self, pod: ObservedPod) -> str:
        describe = f"kubectl describe pod --namespace {self.namespace} {pod.name}"
        if pod.node is None:
            return f"A finalizer keeps it: {describe}."
        if pod.deletion_grace_seconds == 0:
            return f"It was removed by force, but has a finalizer: {describe}."
        if self._unreachable_since(pod) is None and self.nodes:
            return (
                f"{describe} and the log of the kubelet show why: a process that cannot be killed, a volume, a "
                "finalizer."
            )
        danger = "Its processes may still write to the volume, so RLJob waits. "
        return (
            f"{danger if pod.role == 'controller' and self.own_trainer else ''}Make sure that the machine is off, then "
            f"run kubectl taint nodes {pod.node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute, or kubectl "
            f"delete pod --namespace {self.namespace} {pod.name} --force; the job continues by itself."
        )
