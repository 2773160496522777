"""The RLJob: job.yaml with this machine's pods, a volume on its disk, and injected faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.harness.gpu_cluster import host_pods
from bench.harness.gpu_cluster.one_node import NAMESPACE
from rljob_api.fault_injection import Fault
from rljob_cluster.layout import ClusterLayout
from rljob_operator import names

MANIFEST = Path(__file__).parent / "job.yaml"


@dataclass(frozen=True, slots=True)
class RecoveryJob:
    """The job, and its volume."""

    manifest: dict[str, Any]
    volume: Path
    """The folder of this machine that the pods write to."""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def output(self) -> Path:
        """Output folder of the run. Jobs with a volume of their own choice have a folder each on it."""
        return self.volume / self.name

    @property
    def ledger(self) -> Path:
        return self.output / "ledger.jsonl"

    @property
    def faults(self) -> list[dict[str, Any]]:
        faults: list[dict[str, Any]] = self.manifest["spec"]["faultInjection"]["faults"]
        return faults


def recovery_job(layout: ClusterLayout, faults: Sequence[Fault], model: str | None) -> RecoveryJob:
    """`model`: URI of a model other than job.yaml's."""
    manifest = yaml.safe_load(MANIFEST.read_text())
    head = f"{names.service_name(manifest['metadata']['name'])}.{NAMESPACE}.svc"
    volume = layout.state / "checkpoints"
    spec = manifest["spec"]
    spec["controller"] = {"template": host_pods.template(layout, head)}
    spec["policy"] = {"template": host_pods.template(layout, head)}
    spec["checkpoint"]["volume"] = {"hostPath": {"path": str(volume), "type": "DirectoryOrCreate"}}
    spec["faultInjection"] = {
        "enabled": bool(faults),
        "faults": [fault.model_dump(mode="json", by_alias=True) for fault in faults],
    }
    if model:
        spec["model"]["uri"] = model
    return RecoveryJob(manifest, volume)
