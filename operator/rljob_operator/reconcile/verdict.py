"""What the end of an attempt means for the job."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.conditions import AttemptReason, ConditionReason
from rljob_api.step_report import Evidence
from rljob_operator.reconcile.observed import ObservedPod


@dataclass(frozen=True, slots=True)
class Complete:
    """Every step is committed."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Another attempt under the same plan, counted against `recovery.maxRestarts`."""


@dataclass(frozen=True, slots=True)
class NotCounted:
    """Another attempt. The job is not to blame, so nothing is counted."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Another attempt under a changed memory plan, where a change is left that may help."""

    evidence: Evidence
    """With its diagnoses, the likeliest first."""
    pod: ObservedPod
    """The pod whose memory ran out."""
    advice: str = ""
    """What the user can do about it, where nothing is changed."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job has failed: another attempt could not help."""

    reason: ConditionReason


Verdict = Complete | Restart | OutOfMemory | NotCounted | GiveUp


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """Why an attempt ends, and what follows."""

    reason: AttemptReason
    message: str
    """A sentence for people: what happened, and what to do where something can be done."""
    verdict: Verdict
    exit_code: int | None = None
