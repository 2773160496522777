"""Results of decisions: the writes for one job, the end of an attempt, and reports of a job that is not reconciled."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.conditions import AttemptReason
from rljob_api.status import RLJobStatus
from rljob_api.step_report import Evidence, ExitDecision
from rljob_memory.recovery import GiveUpReason
from rljob_operator.events import EventNote, EventReason
from rljob_operator.objects.attempt import Manifest
from rljob_operator.reconcile.observed import ObservedPod


@dataclass(frozen=True, slots=True)
class PodDeletion:
    """Delete this very pod: the uid is a precondition, so that a successor of the same name is never hit."""

    name: str
    uid: str
    grace_seconds: int | None = None
    """None: the pod's own."""


@dataclass(frozen=True, slots=True)
class PodResize:
    """Raise the memory limit of the container `rljob` of this very pod, which keeps running."""

    name: str
    uid: str
    limit_bytes: int
    with_request: bool
    """The request equals the limit, and has to stay equal: a pod cannot change its QoS class."""


@dataclass(frozen=True, slots=True)
class Desired:
    """Writes to execute; the default is none.

    Rule of the whole operator: a reconcile acts only on the *observed* status. To start attempt 2, one reconcile writes
    a status with attempt 2 and nothing else; the reconcile that observes this status creates the pods. So the operator
    can be killed between any two writes, and actions are never ahead of the status.
    """

    claim: str | None = None
    """Installation to write into the annotation of the job, before anything else: another one may have done so."""
    finalizer: bool | None = None
    """True adds it, False removes it last of all, None leaves it."""
    required_config_map: str | None = None
    """ConfigMap of `spec.task.files.configMap`, looked up before objects are written. Without it, a kubelet waits, and
    the status of the pod does not show why."""
    apply: tuple[Manifest, ...] = ()
    """Server-side apply, in any order."""
    create: tuple[Manifest, ...] = ()
    """Create if absent, pods last; an existing object is not changed."""
    verify: tuple[Manifest, ...] = ()
    """Create again if it was deleted; an existing object is not changed. Done last."""
    resize_pods: tuple[PodResize, ...] = ()
    """Done first. A refusal is an Event, and is not repeated."""
    delete_pods: tuple[PodDeletion, ...] = ()
    delete_workloads: tuple[str, ...] = ()
    """Kueue's Workloads, by name: Kueue releases pods that it has not admitted when their Workload is deleted."""
    decision: ExitDecision | None = None
    """For a controller that waits; written into its StepReport."""
    profile: Manifest | None = None
    """MemoryProfile to write, before the status. Best effort: a job does not depend on it."""
    delete_profiles: tuple[str, ...] = ()
    """MemoryProfiles of the namespace that have expired, or exceed the maximum."""
    delete_job: bool = False
    """The time to live has passed."""
    status: RLJobStatus | None = None
    """The whole status; written last (before the finalizer is removed), if it differs from the observed one."""
    is_status_delayed: bool = False
    """A change of the status waits, because the job has written too often."""
    events: tuple[EventNote, ...] = ()
    """Recorded after the write of the status has succeeded, or if there was nothing to write."""
    requeue_after_seconds: float | None = None
    """Reconcile again after this time even without a change: a deadline, a time to live, a delay."""


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Cause of a failed attempt, from which the recovery engine decides what follows."""

    final: GiveUpReason | None = None
    """Reason why another attempt could not help; None if it could."""
    evidence: Evidence | None = None
    """Evidence of an out-of-memory failure, with its diagnoses; None for any other failure."""
    pod: ObservedPod | None = None
    """The pod whose memory ran out."""
    advice: str = ""
    """Change of the manifest that helps if the memory plan is not changed."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Reason why an attempt ends, and its meaning for the job.

    ALL_STEPS_COMMITTED completes the job. Otherwise another attempt follows, unless a `failure` makes that useless.
    """

    reason: AttemptReason
    message: str
    """Cause, and advice if there is any."""
    failure: AttemptFailure | None = None
    """None if the job did not cause the end: it does not count as a restart."""
    exit_code: int | None = None


# --- Reports about a job that cannot be reconciled ---


_MAX_ERROR_CHARACTERS = 300


def report_bug(error: Exception) -> EventNote:
    """Report an error of the operator. The job has not failed: a corrected operator continues it."""
    return _report(
        f"the operator cannot reconcile this job ({type(error).__name__}: {str(error)[:_MAX_ERROR_CHARACTERS]}); this "
        "is a bug in the operator: report it with the operator's log, and change or delete the job"
    )


def report_unfinished(deaths: int) -> EventNote:
    """Report a job during whose reconcile the operator's process has ended `deaths` times."""
    times = "once" if deaths == 1 else f"{deaths} times"
    return _report(
        f"the operator's process ended {times} while it reconciled this job, so it reconciles all other jobs first and "
        "waits before it tries again; shorten the job's templates, use fewer replicas, or delete the job"
    )


def _report(message: str) -> EventNote:
    return EventNote("Warning", EventReason.RECONCILE_ERROR.value, message)
