"""The end of a job that is being deleted: its pods go first, so that the step in hand is committed."""

from __future__ import annotations

from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.teardown import next_deletions


def let_go(observed: Observed) -> Desired:
    if observed.pods:
        return Desired(delete_pods=next_deletions(observed.pods))
    return Desired(finalizer=False) if observed.has_finalizer else Desired()
