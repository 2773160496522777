"""One job as it was observed, for who decides about it and for who writes about just that state of it."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_operator.kube.resources import Object
from rljob_operator.reconcile.observed import Observed


@dataclass(frozen=True, slots=True)
class Observation:
    """What decisions depend on (`observed`), and the stored state of the job that writes are made for."""

    observed: Observed
    resource_version: str
    finalizers: tuple[str, ...]
    status: Object
    """The status as it is stored; empty where there is none."""
