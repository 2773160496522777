"""The soak: streams of jobs, faults at their times, then a search for leaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_testing.soak import processes
from rljob_testing.soak.cluster import SoakCluster
from rljob_testing.soak.faults import Fault, inject
from rljob_testing.soak.job_stream import JobStream
from rljob_testing.soak.leaks import find_leaks, used_bytes
from rljob_testing.soak.report import Footprint, Soak
from rljob_testing.soak.schedule import PlannedFault, planned_faults
from rljob_testing.soak.tenant import HostileTenant

_LAST_START_SECONDS = 60.0
"""No job starts in the last minute of the faults."""
_TO_END_SECONDS = 900.0
"""Time for jobs to end after the last fault: the longest delay between two attempts, and a long job."""
_TO_SETTLE_SECONDS = PATIENCE_SECONDS
"""The kubelet cleans up after a pod about once a minute."""
_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """Size and seed of a soak."""

    seed: int
    minutes: float
    """Minutes of faults; jobs that run then are followed to their end."""
    streams: int
    """Jobs at a time."""
    folder: Path
    """Folder for the status and ledger of each job."""
    hostile_tenant: bool = False
    """Let a tenant store hostile objects in another namespace meanwhile."""


def run_soak(settings: SoakSettings, cluster: SoakCluster, log: Callable[[str], None]) -> Soak:
    """Run a soak. Raises ApiServerAway or ClusterError if the cluster does not recover from a fault."""
    cluster.delete_namespace()
    cluster.create_namespace()
    before, leaked_before = _footprint(cluster), find_leaks(cluster)
    began = time.monotonic()
    ends = began + 60 * settings.minutes
    with ThreadPoolExecutor(settings.streams + 1) as threads:
        tenant = (
            threads.submit(HostileTenant(cluster, settings.seed, ends, log).run) if settings.hostile_tenant else None
        )
        streams = [threads.submit(stream.run) for stream in _streams(settings, cluster, ends, log)]
        faults = _inject_all(planned_faults(settings.seed, 60 * settings.minutes), began, cluster, log)
        log("no more faults")
        outcomes = [outcome for stream in streams for outcome in stream.result()]
        hostile = dict(tenant.result()) if tenant else {}
    left = _settled_leaks(leaked_before, cluster)
    soak = Soak(
        seed=settings.seed,
        minutes=settings.minutes,
        streams=settings.streams,
        seconds=time.monotonic() - began,
        outcomes=outcomes,
        faults=faults,
        before=before,
        after=_footprint(cluster),
        leaks=left,
        kubernetes=cluster.version(),
        hostile_objects=hostile,
    )
    cluster.delete_namespace()
    return soak


def _streams(settings: SoakSettings, cluster: SoakCluster, ends: float, log: Callable[[str], None]) -> list[JobStream]:
    settings.folder.mkdir(parents=True, exist_ok=True)
    last_start, deadline = ends - _LAST_START_SECONDS, ends + _TO_END_SECONDS
    return [
        JobStream(number, settings.seed, cluster, last_start, deadline, settings.folder, log)
        for number in range(settings.streams)
    ]


def _inject_all(
    planned: Sequence[PlannedFault], began: float, cluster: SoakCluster, log: Callable[[str], None]
) -> list[Fault]:
    faults = []
    for fault in planned:
        time.sleep(max(0.0, began + fault.at_seconds - time.monotonic()))
        done = inject(fault, cluster)
        log(f"{fault.kind}: {done.target if done else 'no target'}")
        faults += [done] if done else []
    return faults


def _settled_leaks(leaked_before: set[str], cluster: SoakCluster) -> list[str]:
    deadline = Deadline(_TO_SETTLE_SECONDS)
    while (left := find_leaks(cluster) - leaked_before) and not deadline.passed:
        time.sleep(_LOOK_SECONDS)
    return sorted(left)


def _footprint(cluster: SoakCluster) -> Footprint:
    uids = [pod["metadata"]["uid"] for pod in cluster.operator_pods()]
    running = [found for uid in uids for found in processes.processes_of_pod(uid)]
    return Footprint(used_bytes(cluster), max((found.resident_bytes() for found in running), default=0))
