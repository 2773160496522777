"""Rollout pods that are lost while others generate: they are replaced within the attempt, which continues.

The trainer gives the work of a lost engine to the others, and starts the engine again when a pod of the same name has
joined (`rljob_trainer.roles.engine_processes`). The record in the status comes first: pods are deleted and created only
for names that the stored status has.
"""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import ConditionType
from rljob_operator import labels
from rljob_operator.events import EventReason
from rljob_operator.reconcile.creation import build
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.memory_recovery import OUT_OF_MEMORY_CODES
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.placement import unplaceable
from rljob_operator.reconcile.pod_deletion import Termination, delete_pods
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.timeouts import start_problem
from rljob_operator.reconcile.view import JobView, elapsed_seconds, soonest

MAX_REPLACEMENTS = 20
"""Maximum in one attempt. More of them mean that the cluster has no room for the job."""

_REFUSED_AGAIN_SECONDS = 30.0
"""Age at which a replacement that its node has refused is deleted and created again: the node may refuse the next one
at once."""


def lost_pods(view: JobView) -> frozenset[str]:
    """Names of the rollout pods of a live attempt that are lost, and can be replaced in it."""
    if view.attempt is None or not _can_continue(view):
        return frozenset()
    known = set(view.attempt.replacing_pods)
    rollouts = [name for name, role in view.expected_pods if role == "rollout"]
    present = {pod.name: pod for pod in view.pods}
    lost = {name for name in rollouts if name not in present or _is_lost(present[name])}
    starting = {name for name in known & set(present) if not (present[name].ready or present[name].ended)}
    working = set(rollouts) - lost - starting
    few = view.attempt.pod_replacements + len(lost - known) <= MAX_REPLACEMENTS
    return frozenset(lost) if lost and working and few and _as_present_ones(view) else frozenset()


def without(names: frozenset[str], view: JobView) -> JobView:
    """The attempt as far as it has to be judged: pods that are replaced do not end it."""
    return replace(
        view,
        pods=[pod for pod in view.pods if pod.name not in names],
        missing=[name for name in view.missing if name not in names],
    )


def record_replacements(lost: frozenset[str], view: JobView, draft: StatusDraft) -> bool:
    """Record the pods that are lost now, and those that are back. Returns True if reconcile must not do anything else
    yet."""
    assert view.attempt is not None
    known = view.attempt.replacing_pods
    ready = {pod.name for pod in view.pods if pod.ready and not pod.taken_by_cluster}
    names = [name for name, _ in view.expected_pods if name in lost or (name in known and name not in ready)]
    for name in sorted(set(known) & ready):
        draft.event("Normal", EventReason.POD_REPLACED, f"pod {name} is back")
    added = sorted(set(names) - set(known))
    for name in added:
        draft.event("Warning", EventReason.REPLACING_POD, f"{_loss(name, view)}; the other rollout pods continue")
    if names != known:
        count = view.attempt.pod_replacements + len(added)
        draft.change_attempt(replacing_pods=names, pod_replacements=count)
    return bool(added)


def delete_lost(lost: frozenset[str], view: JobView) -> Desired:
    """Delete the remaining objects of lost pods, so that their replacements can have their names."""
    if not lost:
        return Desired()
    leaving = [pod for pod in view.pods if pod.name in lost]
    kept = {pod.name: wait for pod in leaving if (wait := _seconds_kept(pod, view))}
    now = [pod for pod in leaving if pod.name not in kept]
    deletions = delete_pods(now, Termination.of(view.observed, view.settings, view.now))
    return replace(deletions, requeue_after_seconds=soonest(deletions.requeue_after_seconds, *kept.values()))


def waiting_for(view: JobView, draft: StatusDraft) -> str:
    """Clause about the pods that are being replaced, and the reason why they do not run; empty if there are none."""
    names = draft.attempt.replacing_pods if draft.attempt else []
    if not names:
        return ""
    ended = next((pod.name for pod in view.pods if pod.name in names and pod.ended), None)
    why = unplaceable(view) or start_problem(view) or (ended and _loss(ended, view))
    return f" without {', '.join(names)}, which the operator replaces{f': {why}' if why else ''}"


def _can_continue(view: JobView) -> bool:
    """The trainer works on, as far as is known, and can do so without one of its rollout pods."""
    attempt, controller = view.attempt, view.controller
    if attempt is None or attempt.pods_of_attempt is not None:
        return False
    if controller is None or controller.ended or controller.end or view.pending_exit or view.spec.suspend:
        return False
    others = [pod for pod in view.pods if pod.role != "rollout"]
    whole = len(others) == sum(role != "rollout" for _, role in view.expected_pods)
    return (
        view.holds(ConditionType.RUNNING)
        and view.report_of_attempt is not None
        and whole
        and not any(pod.taken_by_cluster or pod.ended for pod in others)
        and not any(pod.in_group for pod in view.pods)
    )


def _is_lost(pod: ObservedPod) -> bool:
    """The cluster has taken it. A pod that used too much memory or disk would do so again."""
    out_of_memory = pod.end is not None and (pod.end.reason == "OOMKilled" or pod.end.exit_code in OUT_OF_MEMORY_CODES)
    return pod.taken_by_cluster and not pod.evicted and not out_of_memory


def _as_present_ones(view: JobView) -> bool:
    """A pod that is created now is like the present ones: the spec of the job has not changed meanwhile."""
    assert view.attempt is not None
    objects = build(view, view.attempt.number)
    if isinstance(objects, str):
        return False
    wanted = {pod["metadata"]["name"]: pod["metadata"]["annotations"][labels.SPEC_DIGEST] for pod in objects.pods}
    return all(wanted.get(pod.name) == pod.spec_digest for pod in view.pods if pod.role == "rollout")


def _seconds_kept(pod: ObservedPod, view: JobView) -> float:
    """Seconds until a pod that has ended before it started is deleted."""
    refused = pod.ended and not pod.started
    return max(0.0, _REFUSED_AGAIN_SECONDS - elapsed_seconds(pod.created_at, view.now)) if refused else 0.0


def _loss(name: str, view: JobView) -> str:
    pod: ObservedPod | None = next((pod for pod in view.pods if pod.name == name), None)
    if pod is None:
        return f"pod {name} is gone"
    why = f" ({pod.disruption})" if pod.disruption else ""
    return f"pod {name} was taken from node {pod.node}{why}"
