"""What is to be done about one job now: the result of reconcile, carried out by apply in the order of the fields."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.status import RLJobStatus
from rljob_operator.event_note import EventNote
from rljob_operator.objects.metadata import Manifest

__all__ = ["Desired", "EventNote", "Manifest", "PodDeletion"]


@dataclass(frozen=True, slots=True)
class PodDeletion:
    """Delete this very pod: the uid is a precondition, so that a successor of the same name is never hit."""

    name: str
    uid: str
    grace_seconds: int | None = None
    """None: the pod's own."""


@dataclass(frozen=True, slots=True)
class Desired:
    """Nothing set: nothing to do.

    Rule of the whole operator: a reconcile acts only on what the *observed* status says already. To start attempt 2,
    one round writes a status with attempt 2 in it and does nothing else; the round that observes this status makes the
    pods. So the operator can die between any two writes, and what is done is never ahead of what is written down.
    """

    finalizer: bool | None = None
    """True: put it on; False: take it off, last of all; None: leave it."""
    apply: tuple[Manifest, ...] = ()
    """Server-side apply, in order."""
    create: tuple[Manifest, ...] = ()
    """Create where absent, in order; one that exists already is left as it is."""
    delete_pods: tuple[PodDeletion, ...] = ()
    delete_workloads: tuple[str, ...] = ()
    """Kueue's Workloads, by name: Kueue lets go of pods that it has not admitted when their Workload is deleted."""
    delete_job: bool = False
    """The time to live is over."""
    status: RLJobStatus | None = None
    """The whole status; written last (before the finalizer goes), and only where it differs from the observed one."""
    events: tuple[EventNote, ...] = ()
    """Sent when the status write has succeeded, or where there was nothing to write."""
    requeue_after_seconds: float | None = None
    """Reconcile again after so long, even where nothing happens: a deadline, a time to live, a delay."""
