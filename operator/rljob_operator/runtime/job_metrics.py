"""Counters of job outcomes, derived from the difference between two statuses."""

from __future__ import annotations

from rljob_api.plan_change import DiagnosisStatus, PlanChange
from rljob_api.status import RLJobStatus
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery import CHANGEABLE_SETTINGS
from rljob_operator.kube.resources import Object
from rljob_operator.metrics import ADJUSTMENTS, JOB_RESTARTS, JOBS_FINISHED, OUT_OF_MEMORY, SECONDS_TO_RECOVER


def count(before: Object, written: RLJobStatus | None) -> None:
    """Count the changes from status `before` (as stored) to `written`; None if no status was written."""
    if written is None:
        return
    restarts = written.restarts - int(before.get("restarts") or 0)
    if restarts > 0:
        JOB_RESTARTS.inc(restarts)
    phase = written.display.phase if written.display else ""
    if phase in ("Complete", "Failed") and phase != (before.get("display") or {}).get("phase"):
        JOBS_FINISHED.labels(phase).inc()
    known = {change["generation"]: change for change in before.get("planChanges") or ()}
    for change in written.plan_changes:
        _count_change(known.get(change.generation), change)
    if set(known) >= {change.generation for change in written.plan_changes}:
        _count_failure_without_change(before, written)


def _count_change(before: Object | None, change: PlanChange) -> None:
    if before is None:
        # Pods report any name, and the operator keeps each label as long as it runs.
        ADJUSTMENTS.labels(change.remedy.setting if change.remedy.setting in CHANGEABLE_SETTINGS else "other").inc()
        if not change.preventive:
            OUT_OF_MEMORY.labels(_class_of(change.diagnosis)).inc()
    if change.seconds_to_recover is not None and (before is None or before.get("secondsToRecover") is None):
        SECONDS_TO_RECOVER.observe(change.seconds_to_recover)


def _count_failure_without_change(before: Object, written: RLJobStatus) -> None:
    """Count an out-of-memory failure after which the plan was not changed."""
    latest = written.last_out_of_memory
    if latest and latest.model_dump(mode="json", by_alias=True, exclude_none=True) != before.get("lastOutOfMemory"):
        OUT_OF_MEMORY.labels(_class_of(latest.diagnosis)).inc()


def _class_of(diagnosis: DiagnosisStatus) -> str:
    return diagnosis.class_name if diagnosis.class_name in set(FailureClass) else str(FailureClass.UNKNOWN)
