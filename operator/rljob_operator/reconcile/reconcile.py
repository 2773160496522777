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
from rljob_operator import labels
from rljob_operator.reconcile.creation import report_invalid_spec
from rljob_operator.reconcile.desired import Desired, EventNote
from rljob_operator.reconcile.exit_decision import exit_decision
from rljob_operator.reconcile.finished import run_finished
from rljob_operator.reconcile.live_attempt import run_attempt, stop_attempt
from rljob_operator.reconcile.memory_status import record_plan
from rljob_operator.reconcile.next_attempt import next_attempt
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.pod_deletion import finish_deletion, uses_finalizer, workloads_to_delete
from rljob_operator.reconcile.progress import record_progress
from rljob_operator.reconcile.status_bounds import bounded
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft
from rljob_operator.reconcile.status_write import display, due_write
from rljob_operator.reconcile.summary import summarize
from rljob_operator.reconcile.timing import soonest
from rljob_operator.reconcile.view import Stage, build_view
from rljob_operator.settings import OperatorSettings


def reconcile(observed: Observed, settings: OperatorSettings, now: datetime) -> Desired:
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


def _decide(observed: Observed, settings: OperatorSettings, now: datetime) -> Desired:
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
    desired: Desired, draft: StatusDraft, observed: Observed, settings: OperatorSettings, now: datetime
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
