"""One observation of a job, for the decision and for the writes that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rljob_operator.kube.resources import Object
from rljob_operator.reconcile.observed import Observed


@dataclass(frozen=True, slots=True)
class Observation:
    """Input of a decision (`observed`), and the stored state of the job that its writes are based on."""

    read_observed: Callable[[], Observed]
    """Parse the job and its report. That takes up to half a second, so the first call belongs into a thread."""
    resource_version: str
    finalizers: tuple[str, ...]
    read_status: Callable[[], Object]
    """Read the stored status. Only reconciles that write need it, and most do not."""

    @property
    def observed(self) -> Observed:
        """The input of a decision."""
        return self.read_observed()

    @property
    def status(self) -> Object:
        """The stored status; empty if there is none."""
        return self.read_status()
