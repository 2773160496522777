"""The soak itself: jobs in lanes, faults at their times, and then a look at what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rljob_testing.soak import processes
from rljob_testing.soak.cluster import SoakCluster
from rljob_testing.soak.faults import Fault, strike
from rljob_testing.soak.job_stream import Lane
from rljob_testing.soak.leaks import remains, used_bytes
from rljob_testing.soak.report import Footprint, Soak
from rljob_testing.soak.schedule import PlannedFault, planned_faults

_LAST_START_SECONDS = 60.0
"""No job begins in the last minute of the faults."""
_TO_END_SECONDS = 600.0
"""For jobs that have not ended when the faults have: the longest wait between two attempts, and a long job."""
_TO_SETTLE_SECONDS = 180.0
"""The kubelet looks for what is left of a pod once a minute or so."""
_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Order:
    """`minutes`: of faults; jobs under way then are waited for. `lanes`: jobs at a time. `kept`: their folder."""

    seed: int
    minutes: float
    lanes: int
    kept: Path


def run_soak(order: Order, cluster: SoakCluster, tell: Callable[[str], None]) -> Soak:
    """Raises ApiServerAway and ClusterError, where the cluster does not come back from what was done to it."""
    cluster.delete_namespace()
    cluster.create_namespace()
    before, there_before = _footprint(cluster), remains(cluster)
    began = time.monotonic()
    ends = began + 60 * order.minutes
    with ThreadPoolExecutor(order.lanes) as threads:
        lanes = [threads.submit(lane.run) for lane in _lanes(order, cluster, ends, tell)]
        faults = _strike_all(planned_faults(order.seed, 60 * order.minutes), began, cluster, tell)
        tell("no more faults")
        outcomes = [outcome for lane in lanes for outcome in lane.result()]
    left = _left_behind(there_before, cluster)
    soak = Soak(
        seed=order.seed,
        minutes=order.minutes,
        lanes=order.lanes,
        seconds=time.monotonic() - began,
        outcomes=outcomes,
        faults=faults,
        before=before,
        after=_footprint(cluster),
        left_behind=left,
        kubernetes=cluster.version(),
    )
    cluster.delete_namespace()
    return soak


def _lanes(order: Order, cluster: SoakCluster, ends: float, tell: Callable[[str], None]) -> list[Lane]:
    order.kept.mkdir(parents=True, exist_ok=True)
    last_start, deadline = ends - _LAST_START_SECONDS, ends + _TO_END_SECONDS
    return [Lane(number, order.seed, cluster, last_start, deadline, order.kept, tell) for number in range(order.lanes)]


def _strike_all(
    planned: Sequence[PlannedFault], began: float, cluster: SoakCluster, tell: Callable[[str], None]
) -> list[Fault]:
    faults = []
    for fault in planned:
        time.sleep(max(0.0, began + fault.at_seconds - time.monotonic()))
        done = strike(fault, cluster)
        tell(f"{fault.kind}: {done.target if done else 'nothing there that it could be done to'}")
        faults += [done] if done else []
    return faults


def _left_behind(there_before: set[str], cluster: SoakCluster) -> list[str]:
    end = time.monotonic() + _TO_SETTLE_SECONDS
    while (left := remains(cluster) - there_before) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    return sorted(left)


def _footprint(cluster: SoakCluster) -> Footprint:
    uids = [pod["metadata"]["uid"] for pod in cluster.operator_pods()]
    running = [found for uid in uids for found in processes.processes_of_pod(uid)]
    return Footprint(used_bytes(cluster), max((found.resident_bytes() for found in running), default=0))
