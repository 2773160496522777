"""Pods of a live attempt: their creation, the restart of their containers for the next attempt, and the replacement of
lost rollout pods.

The trainer gives the work of a lost engine to the others, and starts the engine again when a pod of the same name has
joined (`rljob_trainer.roles.engine_processes`). The record in the status comes first: pods are deleted and created only
for names that the stored status has.
"""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import AttemptReason, ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.status import AttemptStatus
from rljob_api.step_report import ExitDecision
from rljob_memory.next_plan import plan_of_next_attempt
from rljob_memory.plan_settings import planned_host_memory
from rljob_operator import labels
from rljob_operator.events import EventReason
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.job_objects import JobObjects, build_job_objects
from rljob_operator.objects.strategic_merge import InvalidTemplate
from rljob_operator.reconcile.desired import AttemptFailure, AttemptResult, Desired, PodResize
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.placement import controller_placement, gang_of, unplaceable
from rljob_operator.reconcile.pod_deletion import delete_pods
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.timers import counted_attempts, restart_delay_seconds, start_problem
from rljob_operator.reconcile.view import JobView, elapsed_seconds, is_finished, soonest


def build(view: JobView, number: int) -> JobObjects | str:
    """Return the objects of attempt `number`, or the error in the templates of the job."""
    observed = view.observed
    usable = [node for node in observed.nodes if node.usable]
    attempt = JobAttempt(
        job=view.job.model_copy(update={"status": None}),
        settings=view.settings,
        namespace=observed.namespace,
        uid=observed.uid,
        number=number,
        plan=view.status.plan,
        plan_changes=tuple(view.status.plan_changes),
        memory_profile=view.status.memory_profile,
        # Pods with a restart rule are scheduled only on nodes that support it, so all nodes have to.
        restarts_in_place=bool(usable) and all(node.restarts_in_place for node in usable),
        controller_placement=controller_placement(observed, view.spec, nodes_are_known=view.settings.watch_nodes),
        gang=gang_of(view),
    )
    try:
        return build_job_objects(attempt, observed.fresh_token)
    except InvalidTemplate as error:
        return str(error)


def _digests(objects: JobObjects) -> dict[str, str]:
    """Return the digest of the spec of each pod, by name."""
    return {pod["metadata"]["name"]: pod["metadata"]["annotations"][labels.SPEC_DIGEST] for pod in objects.pods}


# --- Restart in place ---


_SOLVED_BY_NEW_PROCESSES = (
    AttemptReason.DEVICE_OUT_OF_MEMORY,
    AttemptReason.HOST_OUT_OF_MEMORY,
    AttemptReason.WORKER_LOST,
)
RESTART_TIMEOUT_SECONDS = 60.0
"""Time for all pods to be restarted, once the attempt has begun."""
MAX_RESTARTS_IN_PLACE = 30
"""Maximum for one pod in one attempt. RLJob requests one restart; the kubelet has no back-off for more."""


def can_restart_in_place(view: JobView) -> bool:
    """Return True if the controller waits for the next attempt, and all pods exist and have a restart rule."""
    whole = not view.missing and not view.leftovers and not view.not_restarted
    fit = all(pod.restarts_in_place and not (pod.ended or pod.deleting or pod.disruption) for pod in view.pods)
    # If the ConfigMap is refused, the containers would never get the settings of the attempt.
    writable = view.observed.refused is None
    return view.pending_exit is not None and whole and fit and writable and not view.spec.suspend


def begin_in_place(view: JobView, draft: StatusDraft) -> Desired | None:
    """Begin the next attempt in the pods of this one, which has ended; None if they have to be replaced.

    Their containers are restarted with its settings, and keep node and GPUs. A controller that cannot continue reports
    that in its StepReport and waits. The operator writes the changed plan, then the ConfigMap, then the record of the
    next attempt. The controller sees the record, and all containers end with the exit code that restarts them. If a
    precondition does not hold, the pods are replaced instead, which takes longer.
    """
    ended, plan = view.attempt, view.status.plan
    if ended is None or not can_restart_in_place(view) or _needs_new_pods(ended, view):
        return None
    if plan_of_next_attempt(view.job.spec, plan, view.memory_facts) != plan:
        return None
    objects = build(view, ended.number + 1)
    if isinstance(objects, str) or _digests(objects) != {pod.name: pod.spec_digest for pod in view.pods}:
        return None  # the pods of the next attempt differ in more than their labels
    draft.change_attempt(end_time=view.now, to_step=draft.status.step)
    draft.begin_attempt(
        ended.number + 1,
        plan,
        pods_of_attempt=ended.pods_of_attempt or ended.number,
        restarts_before={pod.name: pod.restart_count for pod in view.pods},
    )
    draft.set(pods=view.pods_by_role)
    draft.reset(ConditionType.RUNNING)
    return Desired(apply=objects.apply)


def _needs_new_pods(ended: AttemptStatus, view: JobView) -> bool:
    """A restart of the containers does not help, or has to be delayed."""
    if ended.remedy:
        return view.status.plan_changes[-1].level == "ReplacePods"
    delay_seconds = restart_delay_seconds(counted_attempts(view.status), view.settings.restart_delay_seconds)
    return ended.reason not in _SOLVED_BY_NEW_PROCESSES or delay_seconds > 0


def restart_seconds_left(view: JobView) -> float | None:
    """Return the seconds until pods that have not restarted are replaced; None if all have."""
    if not view.not_restarted or view.attempt is None:
        return None
    return max(0.0, RESTART_TIMEOUT_SECONDS - elapsed_seconds(view.attempt.start_time, view.now))


def failed_restart_in_place(view: JobView) -> AttemptResult | None:
    """Return the end of an attempt whose pods ended, or kept running, instead of restarting."""
    late = restart_seconds_left(view) == 0.0
    for pod in view.not_restarted:
        if pod.ended or late:
            outcome = "ended" if pod.ended else f"did not restart within {RESTART_TIMEOUT_SECONDS:.0f} s"
            message = f"pod {pod.name} {outcome} during a restart in place; the operator replaces the pods"
            return AttemptResult(AttemptReason.NOT_RESTARTED_IN_PLACE, message)
    return None


def stuck_in_restarts(view: JobView) -> AttemptResult | None:
    """Return the end of an attempt with a pod that keeps restarting. The restart counts, and the pods are replaced."""
    before = view.attempt.restarts_before if view.attempt else {}
    for pod in view.pods:
        restarts = pod.restart_count - before.get(pod.name, 0)
        if pod.restarts_in_place and restarts > MAX_RESTARTS_IN_PLACE:
            message = (
                f"pod {pod.name} was restarted in place {restarts} times in this attempt, on node {pod.node}: a "
                f"container of the template requests restarts; kubectl logs {pod.name} --all-containers shows which"
            )
            return AttemptResult(AttemptReason.RESTART_LOOP, message, AttemptFailure(), ExitCode.RESTART_IN_PLACE)
    return None


def exit_decision(view: JobView) -> ExitDecision | None:
    """Return the decision for a waiting controller; None if none waits, or if it has it.

    Taken from the stored status, so that it follows the record of the next attempt and the settings in the ConfigMap. A
    controller whose pods are replaced gets none: its pod is deleted, and the signal ends the wait.
    """
    report, latest = view.report, view.attempt
    waits = any(pod.role == "controller" and not pod.ended and not pod.deleting for pod in view.observed.pods)
    if not waits or report is None or report.attempt is None or report.pending_exit is None:
        return None
    waiting = report.attempt
    if is_finished(view.status):
        decision = ExitDecision(attempt=waiting)
    elif latest is None or latest.number <= waiting or latest.pods_of_attempt is None:
        return None
    else:
        decision = ExitDecision(attempt=waiting, next_attempt=latest.number, plan_generation=latest.plan_generation)
    return None if decision == report.decision else decision


# --- Larger limits of running pods ---


def resizes(view: JobView) -> tuple[PodResize, ...]:
    """Return the running pods whose memory limit is below that in the plan, as far as their nodes have memory.

    New pods get the limit from the plan (`objects.pod_resources`).
    """
    plan = view.status.plan
    if plan is None:
        return ()
    allocatable = {node.name: node.host_memory_bytes for node in view.observed.nodes if node.host_memory_bytes}
    found = []
    for pod in view.pods:
        before = pod.memory_limit_bytes
        planned = planned_host_memory(plan, pod.role)
        if before is None or planned is None or pod.node is None or pod.ended or pod.deleting:
            continue
        limit = min(planned, allocatable.get(pod.node, planned))
        if limit > before:
            found.append(PodResize(pod.name, pod.uid, limit, with_request=pod.memory_request_bytes == before))
    return tuple(found)


# --- Lost rollout pods ---


MAX_REPLACEMENTS = 20
"""Maximum in one attempt. More of them mean that the cluster has no room for the job."""
_REFUSED_AGAIN_SECONDS = 30.0
"""Age at which a replacement that its node has refused is deleted and created again: the node may refuse the next one
at once."""


def lost_pods(view: JobView) -> frozenset[str]:
    """Return the names of the rollout pods of a live attempt that are lost, and can be replaced in it."""
    if view.attempt is None or not _can_continue(view.attempt, view):
        return frozenset()
    known = set(view.attempt.replacing_pods)
    rollouts = [name for name, role in view.expected_pods if role == "rollout"]
    present = {pod.name: pod for pod in view.pods}
    lost = {name for name in rollouts if name not in present or _is_lost(present[name])}
    starting = {name for name in known & set(present) if not (present[name].ready or present[name].ended)}
    working = set(rollouts) - lost - starting
    few = view.attempt.pod_replacements + len(lost - known) <= MAX_REPLACEMENTS
    if not (lost and working and few):
        return frozenset()
    # A pod that is created now must be like the present ones: the spec of the job may have changed.
    objects = build(view, view.attempt.number)
    wanted = {} if isinstance(objects, str) else _digests(objects)
    same = all(wanted.get(pod.name) == pod.spec_digest for pod in view.pods if pod.role == "rollout")
    return frozenset(lost) if wanted and same else frozenset()


def _can_continue(attempt: AttemptStatus, view: JobView) -> bool:
    """The trainer works, as far as is known, and can do so without one of its rollout pods."""
    controller = view.controller
    if attempt.pods_of_attempt is not None or view.pending_exit or view.spec.suspend:
        return False
    others = [pod for pod in view.pods if pod.role != "rollout"]
    return (
        controller is not None
        and controller.end is None
        and view.holds(ConditionType.RUNNING)
        and view.report_of_attempt is not None
        and len(others) == sum(role != "rollout" for _, role in view.expected_pods)
        and not any(pod.taken_by_cluster or pod.ended for pod in others)
        and not any(pod.in_group for pod in view.pods)
    )


def _is_lost(pod: ObservedPod) -> bool:
    """The cluster has taken it. A pod that used too much memory or disk would do so again."""
    return pod.taken_by_cluster and not pod.evicted and not (pod.end and pod.end.is_out_of_memory)


def without(names: frozenset[str], view: JobView) -> JobView:
    """Return the view in which an attempt is judged: pods that are replaced do not end it."""
    return replace(
        view,
        pods=[pod for pod in view.pods if pod.name not in names],
        missing=[name for name in view.missing if name not in names],
    )


def record_replacements(lost: frozenset[str], view: JobView, draft: StatusDraft) -> bool:
    """Record the pods that are lost now, and those that are back. Return True if pods were added to the record, which
    has to be stored before anything else is done."""
    attempt = view.attempt
    if attempt is None:
        return False
    known = attempt.replacing_pods
    ready = {pod.name for pod in view.pods if pod.ready and not pod.taken_by_cluster}
    names = [name for name, _ in view.expected_pods if name in lost or (name in known and name not in ready)]
    for name in sorted(set(known) & ready):
        draft.event("Normal", EventReason.POD_REPLACED, f"pod {name} is back")
    added = sorted(set(names) - set(known))
    for name in added:
        draft.event("Warning", EventReason.REPLACING_POD, f"{_loss(name, view)}; the other rollout pods continue")
    if names != known:
        draft.change_attempt(replacing_pods=names, pod_replacements=attempt.pod_replacements + len(added))
    return bool(added)


def delete_lost(lost: frozenset[str], view: JobView) -> Desired:
    """Delete the remaining objects of lost pods, so that their replacements can have their names."""
    leaving = [pod for pod in view.pods if pod.name in lost]
    if not leaving:
        return Desired()
    refused = {
        pod.name: max(0.0, _REFUSED_AGAIN_SECONDS - elapsed_seconds(pod.created_at, view.now))
        for pod in leaving
        if pod.ended and not pod.started
    }
    waits = [seconds for seconds in refused.values() if seconds]
    deletions = delete_pods([pod for pod in leaving if not refused.get(pod.name)], view)
    return replace(deletions, requeue_after_seconds=soonest(deletions.requeue_after_seconds, *waits))


def waiting_for(view: JobView, draft: StatusDraft) -> str:
    """Return a clause about the pods that are being replaced, and the reason why they do not run; empty if there are
    none."""
    names = draft.attempt.replacing_pods if draft.attempt else []
    if not names:
        return ""
    ended = next((pod.name for pod in view.pods if pod.name in names and pod.ended), None)
    cause = unplaceable(view) or start_problem(view) or (ended and _loss(ended, view))
    return f" without {', '.join(names)}, which the operator replaces{f': {cause}' if cause else ''}"


def _loss(name: str, view: JobView) -> str:
    pod = next((pod for pod in view.pods if pod.name == name), None)
    if pod is None:
        return f"pod {name} is gone"
    return f"pod {name} was taken from node {pod.node}{f' ({pod.disruption})' if pod.disruption else ''}"
