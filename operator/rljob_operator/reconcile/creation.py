"""Creation of the objects and pods of an attempt, invalid specs, and attempts that begin in the same pods."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.status import AttemptStatus
from rljob_memory.next_plan import plan_of_next_attempt
from rljob_operator import labels
from rljob_operator.events import EventReason
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.job_objects import JobObjects, build_job_objects
from rljob_operator.objects.strategic_merge import InvalidTemplate
from rljob_operator.reconcile.attempt_result import (
    AttemptResult,
    Failed,
    NotCounted,
    counted_attempts,
    restart_delay_seconds,
)
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import ObservedJob, ObservedNode, ObservedPod
from rljob_operator.reconcile.placement import controller_placement, gang_of
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.view import JobView, elapsed_seconds


def create_missing(objects: JobObjects, view: JobView) -> Desired:
    """Create supporting objects first: a pod that starts before its Secret exists waits for the next kubelet retry."""
    missing = set(view.missing)
    pods = tuple(pod for pod in objects.pods if pod["metadata"]["name"] in missing)
    return Desired(require=objects.require, apply=objects.apply, create=objects.create + pods, events=objects.notices)


def build(view: JobView, number: int) -> JobObjects | str:
    """The objects of attempt `number`, or the error in the templates of the job."""
    observed = view.observed
    attempt = JobAttempt(
        job=view.job.model_copy(update={"status": None}),
        settings=view.settings,
        namespace=observed.namespace,
        uid=observed.uid,
        number=number,
        plan=view.status.plan,
        plan_changes=tuple(view.status.plan_changes),
        restarts_in_place=_can_restart_in_place(observed.nodes),
        controller_placement=controller_placement(observed, view.spec, nodes_are_known=view.settings.watch_nodes),
        gang=gang_of(view),
    )
    try:
        return build_job_objects(attempt, observed.fresh_token)
    except InvalidTemplate as error:
        return str(error)


def _can_restart_in_place(nodes: Sequence[ObservedNode]) -> bool:
    """Pods with a restart rule are scheduled only on nodes that support it, so all nodes have to."""
    usable = [node for node in nodes if node.usable]
    return bool(usable) and all(node.restarts_in_place for node in usable)


def harmless_foreign_pods(view: JobView) -> list[str]:
    """Foreign pods that have the job's labels, but no name that the job needs."""
    return sorted(set(view.observed.foreign_pods) - {name for name, _ in view.expected_pods})


def report_invalid_spec(observed: ObservedJob, draft: StatusDraft) -> Desired:
    """Report a job that cannot be parsed. Running pods keep the spec that they started with."""
    problem = observed.problem or "cannot parse the spec"
    if draft.status.completion_time is not None:
        return Desired()
    if any(not pod.ended for pod in observed.pods):
        message = f"the running attempt keeps its spec; the changed spec is invalid: {problem}"
        draft.invalid_spec = message
        return Desired()
    if draft.holds(ConditionType.RUNNING):
        draft.condition(ConditionType.RUNNING, False, ConditionReason.PODS_TERMINATED, "the pods have terminated")
    return set_invalid_spec(problem, draft)


def set_invalid_spec(problem: str, draft: StatusDraft) -> Desired:
    """Record that no attempt can use the spec. This is no failure of the job, which continues with a corrected spec."""
    if draft.reason(ConditionType.STALLED) != ConditionReason.INVALID_SPEC:
        draft.event("Warning", EventReason.INVALID_SPEC, problem)
    if draft.holds(ConditionType.FAILED):  # as earlier versions of the operator reported an invalid spec
        draft.reset(ConditionType.FAILED)
    draft.invalid_spec = f"{problem}; fix the spec with kubectl apply"
    return Desired()


# --- Restart in place ---


_SOLVED_BY_NEW_PROCESSES = (
    AttemptReason.DEVICE_OUT_OF_MEMORY,
    AttemptReason.HOST_OUT_OF_MEMORY,
    AttemptReason.WORKER_LOST,
)
RESTART_TIMEOUT_SECONDS = 60.0
"""Time for all pods to be restarted, once the attempt has begun."""


def can_restart_in_place(view: JobView) -> bool:
    """The controller waits for the next attempt, and all pods exist and have a restart rule."""
    whole = not view.missing and not view.leftovers and not view.not_restarted
    fit = all(pod.restarts_in_place and not (pod.ended or pod.deleting or pod.disruption) for pod in view.pods)
    # If the ConfigMap is refused, the containers would never get the settings of the attempt.
    writable = view.observed.refused is None
    return view.pending_exit is not None and whole and fit and writable and not view.spec.suspend


def begin_in_place(view: JobView, draft: StatusDraft) -> Desired | None:
    """Begin the next attempt in the pods of this one, which has ended; None if they have to be replaced.

    Their containers are restarted with its settings, and keep node and GPUs.
    A controller that cannot continue reports that in its StepReport and waits. The operator writes the changed plan,
    then the ConfigMap, then the record of the next attempt. The controller sees the record, and all containers end
    with the exit code that restarts them. If a precondition does not hold, the pods are replaced instead, which takes
    longer.
    """
    assert view.attempt is not None
    plan = view.status.plan
    if (
        not can_restart_in_place(view)
        or _needs_new_pods(view)
        or plan_of_next_attempt(view.job.spec, plan, view.memory_profile) != plan
    ):
        return None
    objects = build(view, view.attempt.number + 1)
    if isinstance(objects, str) or not _same_pods(objects, view):
        return None
    draft.change_attempt(end_time=view.now, to_step=draft.status.step)
    draft.begin_attempt(
        AttemptStatus(
            number=view.attempt.number + 1,
            plan_generation=plan.generation if plan else 1,
            start_time=view.now,
            from_step=(draft.status.step or 0) + 1,
            pods_of_attempt=view.attempt.pods_of_attempt or view.attempt.number,
            restarts_before={pod.name: pod.restart_count for pod in view.pods},
        )
    )
    draft.set(pods=view.pods_by_role)
    draft.reset(ConditionType.RUNNING)
    return Desired(apply=objects.apply)


def failed_restart_in_place(view: JobView) -> AttemptResult | None:
    """The end of an attempt whose pods ended, or kept running, instead of restarting."""
    late = restart_seconds_left(view) == 0.0
    for pod in view.not_restarted:
        if pod.ended or late:
            how = "ended" if pod.ended else f"did not restart within {RESTART_TIMEOUT_SECONDS:.0f} s"
            message = f"pod {pod.name} {how} during a restart in place; the operator replaces the pods"
            return AttemptResult(AttemptReason.NOT_RESTARTED_IN_PLACE, message, NotCounted())
    return None


def restart_seconds_left(view: JobView) -> float | None:
    """Seconds until pods that have not restarted are replaced; None if all have."""
    if not view.not_restarted or view.attempt is None:
        return None
    return max(0.0, RESTART_TIMEOUT_SECONDS - elapsed_seconds(view.attempt.start_time, view.now))


def _needs_new_pods(view: JobView) -> bool:
    """A restart of the containers does not help, or has to be delayed."""
    assert view.attempt is not None
    change = view.status.plan_changes[-1] if view.attempt.remedy else None
    if change is not None:
        return change.level == "ReplacePods"
    delay_seconds = restart_delay_seconds(counted_attempts(view.status), view.settings.restart_delay_seconds)
    return view.attempt.reason not in _SOLVED_BY_NEW_PROCESSES or delay_seconds > 0


def _same_pods(objects: JobObjects, view: JobView) -> bool:
    """The pods of the next attempt differ only in their labels."""
    wanted = {pod["metadata"]["name"]: pod["metadata"]["annotations"][labels.SPEC_DIGEST] for pod in objects.pods}
    return wanted == {pod.name: pod.spec_digest for pod in view.pods}


MAX_RESTARTS_IN_PLACE = 30
"""Maximum for one pod in one attempt. RLJob requests one restart; the kubelet has no back-off for more."""


def stuck_in_restarts(view: JobView) -> AttemptResult | None:
    """Result of an attempt with a pod that keeps restarting. The restart counts, and the pods are replaced."""
    for pod in view.pods:
        restarts = _restarts_in_this_attempt(pod, view)
        if pod.restarts_in_place and restarts > MAX_RESTARTS_IN_PLACE:
            message = (
                f"pod {pod.name} was restarted in place {restarts} times in this attempt, on node {pod.node}: a "
                f"container of the template requests restarts; kubectl logs {pod.name} --all-containers shows which"
            )
            return AttemptResult(AttemptReason.RESTART_LOOP, message, Failed(), ExitCode.RESTART_IN_PLACE)
    return None


def _restarts_in_this_attempt(pod: ObservedPod, view: JobView) -> int:
    assert view.attempt is not None
    return pod.restart_count - view.attempt.restarts_before.get(pod.name, 0)
