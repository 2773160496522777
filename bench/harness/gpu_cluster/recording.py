"""What is seen of the job from outside while it runs, and when."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from bench.harness.gpu_cluster.one_node import NAMESPACE, OneNodeCluster
from bench.harness.gpu_cluster.snapshot import ENDS, MOMENTS, Sight, pod_state

_LOOK_SECONDS = 0.2
_RLJOB_PATHS = f"/apis/rljob.dev/v1alpha1/namespaces/{NAMESPACE}"
_POD_PATHS = f"/api/v1/namespaces/{NAMESPACE}/pods"


@dataclass
class Recording:
    """`moments`: seconds until something was first seen; `pods`: every state that a pod was seen in; `last`: what was
    seen last."""

    cluster: OneNodeCluster
    job: str
    moments: dict[str, float] = field(default_factory=dict)
    pods: list[dict[str, Any]] = field(default_factory=list)
    last: Sight = field(default_factory=Sight)
    _began: float = field(default_factory=time.monotonic)
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def begin(self) -> None:
        """Seconds count from here."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)

    @property
    def complete(self) -> bool:
        return "complete" in self.moments

    def follow(self, until: str, deadline: float) -> None:
        """Look until that moment has come, or the job has ended.

        `deadline`: by `time.monotonic()`. Raises TimeoutError there, ClusterError where a program of the cluster ends.
        """
        while not self.moments.keys() & {until, *ENDS}:
            self.cluster.check_running()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.seconds:.0f} s after the job was applied, this has not come: {until}")
            time.sleep(_LOOK_SECONDS)
            self._note(self._look())

    def _look(self) -> Sight:
        return Sight(
            job=self._get(f"{_RLJOB_PATHS}/rljobs/{self.job}"),
            report=self._get(f"{_RLJOB_PATHS}/stepreports/{self.job}"),
            pods=self._get(f"{_POD_PATHS}?labelSelector=rljob.dev/job-name={self.job}").get("items", []),
        )

    def _get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cluster.api.get(path) or "{}")
        return found

    def _note(self, sight: Sight) -> None:
        self.last = sight
        for name, holds in MOMENTS.items():
            if name not in self.moments and holds(sight):
                self.moments[name] = self.seconds
        for state in map(pod_state, sight.pods):
            if self._states.get(state["pod"]) != state:
                self._states[state["pod"]] = state
                self.pods.append({"seconds": self.seconds, **state})
