"""Observes the job while it runs, and records the time of each moment."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.harness.gpu_cluster.one_node import NAMESPACE, OneNodeCluster
from bench.harness.gpu_cluster.snapshot import FINAL_MOMENTS, MOMENTS, JobSnapshot, pod_state

_LOOK_SECONDS = 0.2
_RLJOB_PATHS = f"/apis/rljob.dev/v1alpha1/namespaces/{NAMESPACE}"
_POD_PATHS = f"/api/v1/namespaces/{NAMESPACE}/pods"


@dataclass
class Recording:
    """Observations of one job."""

    cluster: OneNodeCluster
    job: str
    moments: dict[str, float] = field(default_factory=dict)
    """Seconds until each moment was first observed."""
    pods: list[dict[str, Any]] = field(default_factory=list)
    """Every state of a pod that was observed."""
    last: JobSnapshot = field(default_factory=JobSnapshot)
    """The last snapshot."""
    _began: float = field(default_factory=time.monotonic)
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def begin(self) -> None:
        """Start counting seconds."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)

    @property
    def complete(self) -> bool:
        return "complete" in self.moments

    def follow(self, until: str, deadline: float) -> None:
        """Take snapshots until the moment `until`, or until the job has ended.

        `deadline`: by `time.monotonic()`. Raises TimeoutError then, and ClusterError if a program of the cluster ends.
        """
        while not self.moments.keys() & {until, *FINAL_MOMENTS}:
            self.cluster.check_running()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.seconds:.0f} s after the job was applied, this has not come: {until}")
            time.sleep(_LOOK_SECONDS)
            self._note(self._take_snapshot())

    def _take_snapshot(self) -> JobSnapshot:
        return JobSnapshot(
            job=self._get(f"{_RLJOB_PATHS}/rljobs/{self.job}"),
            report=self._get(f"{_RLJOB_PATHS}/stepreports/{self.job}").get("status") or {},
            pods=self._get(f"{_POD_PATHS}?labelSelector=rljob.dev/job-name={self.job}").get("items", []),
        )

    def _get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cluster.api.get(path) or "{}")
        return found

    def _note(self, snapshot: JobSnapshot) -> None:
        self.last = snapshot
        for name, holds in MOMENTS.items():
            if name not in self.moments and holds(snapshot):
                self.moments[name] = self.seconds
        for state in map(pod_state, snapshot.pods):
            if self._states.get(state["pod"]) != state:
                self._states[state["pod"]] = state
                self.pods.append({"seconds": self.seconds, **state})


@contextmanager
def printed_watch(kubectl: list[str], path: Path, seconds: Callable[[], float]) -> Iterator[None]:
    """Write the output to `path` within the block. `seconds`: printed before each line."""
    with subprocess.Popen([*kubectl, "get", "rljobs", "--watch"], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        reader = threading.Thread(target=_copy, args=(watch.stdout, path, seconds))
        reader.start()
        try:
            yield
        finally:
            watch.terminate()
            reader.join()


def _copy(lines: IO[str], path: Path, seconds: Callable[[], float]) -> None:
    with path.open("w") as file:
        for line in lines:
            file.write(f"{seconds():6.1f}  {line}")
