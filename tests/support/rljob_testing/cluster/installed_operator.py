"""The operator as users install it: images on the nodes, the chart by Helm."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass

from rljob_cluster.layout import ClusterLayout
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_testing.repository import CHART

RELEASE, NAMESPACE = "rljob", "rljob-system"

# Short times, so that a test of what happens after them need not wait.
VALUES = (
    "trainer.device=cpu",
    "podDiagnosis.enabled=true",
    "jobs.restartDelaySeconds=1",
    "jobs.statusIntervalSeconds=1",
    # No pod takes that long on a busy machine: a test of this timeout installs the operator with a shorter one.
    "jobs.startTimeoutSeconds=600",
    # Images of one version differ from run to run: the operator's pod is replaced, so that it has the latest.
    f"podAnnotations.test-run={time.time_ns():x}",
)


@dataclass(frozen=True)
class InstalledOperator:
    """A release of the chart in the cluster."""

    cluster: ClusterLayout

    def install(self, *values: str) -> None:
        """Install or upgrade, and wait until the operator is ready."""
        settings = [word for value in (*VALUES, *values) for word in ("--set", value)]
        self._helm("upgrade", "--install", RELEASE, str(CHART), "--create-namespace", "--wait", *settings)

    def uninstall(self) -> None:
        self._helm("uninstall", RELEASE, "--wait")

    def _helm(self, *words: str) -> None:
        command = [str(self.cluster.binaries / "helm"), "--namespace", NAMESPACE, *words]
        environment = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
