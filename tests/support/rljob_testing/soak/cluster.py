"""The cluster of a soak; requests are retried while its API server is away."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rljob_cluster.api_client import StartupClient, admin_client
from rljob_cluster.layout import ClusterLayout
from rljob_testing.cluster import NAMESPACE as OPERATOR_NAMESPACE
from rljob_testing.patience import PATIENCE_SECONDS, Deadline

NAMESPACE = "soak"
_JOBS = f"/apis/rljob.dev/v1alpha1/namespaces/{NAMESPACE}/rljobs"
_LOOK_SECONDS = 1.0
_AWAY_SECONDS = 180.0
"""An API server that is away for longer will not come back."""

Object = dict[str, Any]


class ApiServerAway(Exception):
    """The API server did not answer for minutes."""


@dataclass(frozen=True, slots=True)
class SoakCluster:
    """This machine's cluster, as its administrator."""

    layout: ClusterLayout
    api: StartupClient

    @classmethod
    def of_this_machine(cls) -> SoakCluster:
        layout = ClusterLayout.default()
        return cls(layout, admin_client(layout.control_plane))

    def list_items(self, path: str) -> list[Object]:
        """The objects of a list such as /api/v1/pods. Raises ApiServerAway."""
        found: list[Object] = self._answer(path)["items"]
        return found

    def jobs(self) -> list[Object]:
        return self.list_items(_JOBS)

    def job(self, name: str) -> Object:
        return self._answer(f"{_JOBS}/{name}")

    def pods(self) -> list[Object]:
        """The pods of the jobs."""
        return self.list_items(f"/api/v1/namespaces/{NAMESPACE}/pods")

    def volumes(self) -> list[Object]:
        """The volumes of the whole cluster."""
        return self.list_items("/api/v1/persistentvolumes")

    def operator_pods(self) -> list[Object]:
        selector = "labelSelector=app.kubernetes.io/name=rljob-operator"
        return self.list_items(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods?{selector}")

    def version(self) -> str:
        return str(self._answer("/version")["gitVersion"])

    def create_namespace(self) -> None:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})

    def delete_namespace(self) -> None:
        """Delete the namespace with its contents; returns when it is gone."""
        words = ("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=60s")
        self.kubectl(*words, patience_seconds=PATIENCE_SECONDS)

    def apply(self, manifest: Object) -> None:
        self.kubectl("apply", "-f", "-", manifest=yaml.safe_dump(manifest))

    def delete(self, kind: str, name: str, *options: str, namespace: str = NAMESPACE) -> None:
        """Request a deletion, without waiting for it."""
        self.kubectl("delete", kind, name, "--ignore-not-found", "--wait=false", *options, namespace=namespace)

    def kubectl(
        self,
        *words: str,
        manifest: str | None = None,
        namespace: str = NAMESPACE,
        patience_seconds: float = _AWAY_SECONDS,
    ) -> str:
        """The output of kubectl, once it succeeds. Raises ApiServerAway, with the last error, if it does not."""
        options = (f"--kubeconfig={self.layout.kubeconfig}", f"--namespace={namespace}", "--request-timeout=10s")
        command = [str(self.layout.binaries / "kubectl"), *options, *words]
        deadline = Deadline(patience_seconds)
        while True:
            done = subprocess.run(command, input=manifest, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout
            if deadline.passed:
                raise ApiServerAway(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
            time.sleep(_LOOK_SECONDS)

    def run_folder(self, job: str) -> Path | None:
        """The folder of this machine with the job's ledger and logs; None if the job has no volume."""
        claim = (NAMESPACE, f"{job}-checkpoints")
        return next((folder_of(volume) for volume in self.volumes() if claim_of(volume) == claim), None)

    def _answer(self, path: str) -> Object:
        deadline = Deadline(_AWAY_SECONDS)
        while (answer := self.api.get(path)) is None:
            if deadline.passed:
                raise ApiServerAway(f"the API server did not give {path} for {_AWAY_SECONDS:.0f} s")
            time.sleep(_LOOK_SECONDS)
        found: Object = json.loads(answer)
        return found


def claim_of(volume: Object) -> tuple[str, str]:
    """Namespace and name of the claim that a volume was created for."""
    claim = volume["spec"].get("claimRef", {})
    return claim.get("namespace", ""), claim.get("name", "")


def folder_of(volume: Object) -> Path:
    """The folder of this machine that holds a volume."""
    spec = volume["spec"]
    return Path((spec.get("hostPath") or spec["local"])["path"])
