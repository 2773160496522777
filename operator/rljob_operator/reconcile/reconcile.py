"""The lifecycle of a job, decided from an observation. Pure: no clock, no I/O.

A job goes through attempts. Each has a record in the status before anything of it exists in the cluster:

    between attempts ──▶ live ──▶ stopping ──▶ between attempts      (suspended, restarted, taken away, more steps)
                          └─────▶ finished                            (complete, failed)

The stage of a job is derived from its stored status alone, so the operator can be killed between any two writes: the
next reconcile observes the same state and does the rest.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.step_report import ExitDecision
from rljob_operator import labels
from rljob_operator.events import EventNote, EventReason
from rljob_operator.reconcile.attempt import next_attempt, run_attempt, stop_attempt
from rljob_operator.reconcile.conditions import record_plan, record_progress
from rljob_operator.reconcile.creation import report_invalid_spec
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.finished import run_finished
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.reconcile.pod_deletion import finish_deletion, uses_finalizer, workloads_to_delete
from rljob_operator.reconcile.status import StatusDraft, bounded, display, due_write, summarize
from rljob_operator.reconcile.view import JobView, Stage, build_view, is_finished, soonest
from rljob_operator.settings import OperatorSettings


def reconcile(observed: ObservedJob, settings: OperatorSettings, now: datetime) -> Desired:
    """Decide the writes for one job. Deterministic; does not raise for an invalid job."""
    if observed.delegated:
        # A manifest that was copied from another job may have brought the finalizer along.
        return Desired(finalizer=False) if observed.deleting and observed.has_finalizer else Desired()
    if observed.operator not in ("", settings.installation):
        return _left_to(observed.operator, settings.installation)
    now = now.replace(microsecond=0)  # as Kubernetes writes times
    desired = replace(_decide(observed, settings, now), delete_workloads=workloads_to_delete(observed))
    writes = replace(desired, requeue_after_seconds=None, is_status_delayed=False) != Desired()
    return replace(desired, claim=settings.installation) if writes and not observed.operator else desired


def _left_to(other: str, ours: str) -> Desired:
    message = (
        f"the operator {other} reconciles this job (annotation {labels.OPERATOR}), so {ours} leaves it alone; "
        f"uninstall one of them, or list different namespaces; if {other} is gone: kubectl annotate rljobs --all "
        f"--all-namespaces {labels.OPERATOR}-"
    )
    return Desired(left_to=other, events=(EventNote("Warning", EventReason.MANAGED_BY_ANOTHER_OPERATOR, message),))


def _decide(observed: ObservedJob, settings: OperatorSettings, now: datetime) -> Desired:
    if observed.deleting:
        draft = StatusDraft(observed.status, observed.generation, now)
        desired = finish_deletion(observed, draft, settings, now)
        if draft.reason(ConditionType.SCHEDULED) not in (
            ConditionReason.NODE_LOST,
            ConditionReason.POD_NOT_TERMINATING,
        ):
            return desired  # nobody reads the status of a job that is about to be gone
        draft.condition(ConditionType.RUNNING, False, ConditionReason.STOPPING, "the job is being deleted")
        return _written(desired, draft, observed, settings, now)
    if observed.job is None:
        draft = StatusDraft(observed.status, observed.generation, now)
        return _written(report_invalid_spec(observed, draft), draft, observed, settings, now)

    view = build_view(observed, observed.job, settings, now)
    draft = StatusDraft(view.status, observed.generation, now)
    record_progress(view, draft)
    record_plan(view, draft)
    if view.stage is not Stage.FINISHED and draft.reason(ConditionType.FAILED) != ConditionReason.RESUMED:
        draft.reset(ConditionType.FAILED)  # an invalid spec may have been fixed
    match view.stage:
        case Stage.BETWEEN_ATTEMPTS:
            desired = next_attempt(view, draft)
        case Stage.LIVE:
            desired = run_attempt(view, draft)
        case Stage.STOPPING:
            desired = stop_attempt(view, draft)
        case Stage.FINISHED:
            desired = run_finished(view, draft)
    return _written(replace(desired, decision=exit_decision(view)), draft, observed, settings, now)


def _written(
    desired: Desired, draft: StatusDraft, observed: ObservedJob, settings: OperatorSettings, now: datetime
) -> Desired:
    """Add the drafted status, if it is due for a write, and the finalizer to `desired`."""
    summarize(draft)
    if observed.job is not None:
        draft.observe_generation()
    draft.set(display=display(draft.status))
    status, interval = bounded(draft.status), settings.status_interval_seconds
    write = due_write(observed.status, status, interval, observed.status_wait_seconds, now)
    keeps_finalizer = observed.deleting or observed.has_finalizer == uses_finalizer(settings)
    return replace(
        desired,
        finalizer=desired.finalizer if keeps_finalizer else uses_finalizer(settings),
        status=status.model_copy(update={"update_time": now}) if write.wait_seconds == 0.0 else None,
        is_status_delayed=write.is_delayed,
        # Events of a change come with its write: until then, each reconcile drafts them again.
        events=desired.events if write.is_delayed else desired.events + tuple(draft.events),
        requeue_after_seconds=soonest(desired.requeue_after_seconds, write.wait_seconds or None),
    )


# --- The answer to a controller that waits ---


def exit_decision(view: JobView) -> ExitDecision | None:
    """The decision that a waiting controller is to be given; None if none waits, or if it has it.

    Taken from the stored status, so that it follows the record of the next attempt and the settings in the ConfigMap. A
    controller whose pods are replaced gets none: its pod is deleted, and the signal ends the wait.
    """
    report = view.report
    waits = any(pod.role == "controller" and not pod.ended and not pod.deleting for pod in view.observed.pods)
    if not waits or report is None or report.attempt is None or report.pending_exit is None:
        return None
    decision = _decision_about(report.attempt, view)
    return None if decision == report.decision else decision


def _decision_about(waiting: int, view: JobView) -> ExitDecision | None:
    latest = view.attempt
    if is_finished(view.status):
        return ExitDecision(attempt=waiting)
    if latest is None or latest.number <= waiting or latest.pods_of_attempt is None:
        return None
    return ExitDecision(attempt=waiting, next_attempt=latest.number, plan_generation=latest.plan_generation)
