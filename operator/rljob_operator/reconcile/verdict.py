"""The meaning of an attempt's end for the job."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.conditions import AttemptReason
from rljob_api.step_report import Evidence
from rljob_memory.recovery import GiveUpReason
from rljob_operator.reconcile.observed import ObservedPod


@dataclass(frozen=True, slots=True)
class Complete:
    """Every step is committed."""


@dataclass(frozen=True, slots=True)
class NotCounted:
    """Another attempt follows. The job did not cause the end, so nothing is counted."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed; the recovery engine decides what follows."""

    final: GiveUpReason | None = None
    """Reason why another attempt could not help; None if it could."""
    evidence: Evidence | None = None
    """Evidence of an out-of-memory failure, with its diagnoses; None for every other failure."""
    pod: ObservedPod | None = None
    """The pod whose memory ran out."""
    advice: str = ""
    """Change of the manifest that helps if the memory plan is not changed."""


Verdict = Complete | NotCounted | Failed


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Why an attempt ends, and what follows."""

    reason: AttemptReason
    message: str
    """A sentence for people: what happened, and what to do if something can be done."""
    verdict: Verdict
    exit_code: int | None = None
