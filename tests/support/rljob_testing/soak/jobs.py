"""The jobs of a soak: their kinds, their manifests, which the seed determines, and streams of them."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.fault_injection import Fault, FaultClass, FaultPhase
from rljob_api.plan_change import Role
from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.records import LedgerRecord
from rljob_operator import labels
from rljob_testing.cluster import attempt, digits, finished, holds, status
from rljob_testing.soak.cluster import Object, SoakCluster
from rljob_trainer.roles.faults import target_role

Failures = tuple[tuple[FaultClass, tuple[FaultPhase, ...]], ...]
"""Failure classes, each with the phases to draw from."""

_IN_EVERY_TOPOLOGY: Failures = (
    ("ActivationSpike", ("update",)),
    ("Fragmentation", ("update",)),
    ("WeightSyncSpike", ("sync",)),
    ("OptimizerState", ("optimizer",)),
    ("HostMemory", ("update", "rollout")),
    ("WorkerLost", ("load", "rollout", "update", "optimizer", "sync", "checkpoint")),
)

_FAILURES: dict[str, Failures] = {
    "Colocated": (
        *_IN_EVERY_TOPOLOGY,
        ("AllocatorCache", ("update", "sync")),
        ("KVCacheOversized", ("load", "rollout")),
        ("SharedMemory", ("sync", "rollout")),
    ),
    # Each process has a GPU of its own, so torch's cache is in the way of no other. The engine keeps its KV cache while
    # it receives the weights, which do not pass through /dev/shm.
    "Disaggregated": (
        *_IN_EVERY_TOPOLOGY,
        ("KVCacheOversized", ("load", "rollout", "sync")),
        ("SharedMemory", ("update", "rollout")),
    ),
}

_PARTIAL = {
    "maxStaleness": 1,
    "partialRolloutPrompts": 2,
    "ignoreEndOfSequence": False,
    "maxResponseTokens": 32,
}
"""Responses have different lengths, and the longest ones are left."""

_KINDS: tuple[tuple[tuple[int, ...], Object], ...] = (
    ((0, 0, 1, 1, 2), {"topology": "Colocated"}),
    ((0, 1), {"topology": "Colocated", "policy": {"replicas": 2}}),
    ((0, 1), {"topology": "Disaggregated", "rollout": {"replicas": 1}}),
    ((0, 1), {"topology": "Disaggregated", "rollout": {"replicas": 2}, "algorithm": {"maxStaleness": 1}}),
    ((2,), {"topology": "Colocated", "rollout": {"tensorParallelSize": 2}}),
    (
        (0, 2),
        {
            "topology": "Disaggregated",
            "policy": {"replicas": 2},
            "rollout": {"replicas": 1, "tensorParallelSize": 2},
        },
    ),
    ((0,), {"topology": "Disaggregated", "rollout": {"replicas": 2}, "algorithm": _PARTIAL}),
)
"""GPUs of a worker pod to draw from, and the part of the spec that differs. The nodes have eight GPUs for all jobs, but
few cores."""

_STEPS = (60, 120, 200)
_MOST_FAILURES = 3

# A cluster that loses something every half minute takes more patience than the defaults have.
_PATIENCE = {"maxRestarts": 30, "maxAdjustments": 20, "maxHostMemory": "8Gi", "maxSharedMemory": "4Gi"}


def job_manifest(seed: int, stream: int, number: int) -> Object:
    """The manifest of job `number` in a stream; both count from 0."""
    chance = random.Random(f"{seed}/{stream}/{number}")
    name, (gpus_to_draw, kind), steps = f"soak-{stream}-{number}", chance.choice(_KINDS), chance.choice(_STEPS)
    gpus = chance.choice(gpus_to_draw)
    policy, rollout = {"replicas": 1} | kind.get("policy", {}), kind.get("rollout", {})
    # Without GPUs, a pod of the rollout has one engine, whatever its size.
    of_engine_pod = max(gpus, rollout.get("tensorParallelSize", 1) if "replicas" in rollout else 1)
    processes: dict[Role, int] = {
        "policy": policy["replicas"] * max(gpus, 1),
        "rollout": rollout.get("replicas", policy["replicas"]) * of_engine_pod,
    }
    faults = _faults(chance, _FAILURES[kind["topology"]], steps // 2, processes)
    template = {"spec": _pod(name, {fault.fault_class for fault in faults}, max(gpus, 1))}
    worker = {"gpusPerReplica": gpus, "template": template}
    return digits(
        name,
        topology=kind["topology"],
        algorithm={"steps": steps, "maxStaleness": 0} | kind.get("algorithm", {}),
        checkpoint={"everySteps": chance.choice((5, 20))},
        policy=policy | worker,
        recovery=_PATIENCE,
        faultInjection={"enabled": True, "faults": [fault.model_dump(by_alias=True) for fault in faults]},
        **({"rollout": rollout | (worker if "replicas" in rollout else {})} if rollout else {}),
    )


def _faults(chance: random.Random, failures: Failures, last_step: int, processes: Mapping[Role, int]) -> list[Fault]:
    faults = []
    for class_, phases in chance.sample(failures, chance.randint(1, _MOST_FAILURES)):
        phase = chance.choice(phases)
        # A role loads before step 1, and later only after another failure.
        step = 1 if phase == "load" else chance.randint(1, last_step)
        fault = Fault(fault_class=class_, phase=phase, step=step)
        faults.append(fault.model_copy(update={"rank": chance.randrange(processes[target_role(fault)])}))
    return faults


def _pod(job: str, classes: set[str], processes: int) -> dict[str, Any]:
    """A worker pod: on another node than the job's others if possible, and with the limits that the failures need."""
    # By default a worker requests a core for each GPU, and the workers of one job would leave none to the next.
    resources: dict[str, Any] = {"requests": {"cpu": "200m"}}
    pod: dict[str, Any] = {
        "topologySpreadConstraints": [_spread(job)],
        "containers": [{"name": "rljob", "resources": resources}],
    }
    if "HostMemory" in classes:
        resources["limits"] = {"memory": f"{2 * processes}Gi"}
    if "SharedMemory" in classes:
        pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]
    return pod


def _spread(job: str) -> Object:
    workers = {"key": labels.ROLE, "operator": "In", "values": ["policy", "rollout"]}
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {labels.JOB_NAME: job}, "matchExpressions": [workers]},
    }


_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The last status of a job, and its ledger."""

    job: Object
    ledger: tuple[LedgerRecord, ...]
    ledger_error: str
    """The reason why the ledger cannot be read; empty if it can."""

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class JobStream:
    """Runs jobs one after another."""

    number: int
    seed: int
    cluster: SoakCluster
    last_start: float
    """By `time.monotonic()`: no job starts later."""
    deadline: float
    """By `time.monotonic()`: no job is followed longer."""
    folder: Path
    """Folder for the last status and the ledger of each job."""
    log: Callable[[str], None]

    def run(self) -> list[JobOutcome]:
        """The outcome of each job. Raises ApiServerAway."""
        outcomes: list[JobOutcome] = []
        while time.monotonic() < self.last_start:
            outcomes.append(self._run(job_manifest(self.seed, self.number, len(outcomes))))
        return outcomes

    def _run(self, manifest: Object) -> JobOutcome:
        name = manifest["metadata"]["name"]
        self.cluster.apply(manifest)
        job = self._follow(name)
        self._save(job)
        ledger, ledger_error = self._read_ledger(name)
        self.cluster.delete("rljob", name)
        return JobOutcome(job, ledger, ledger_error)

    def _follow(self, name: str) -> Object:
        logged = ""
        while True:
            job = self.cluster.job(name)
            if (line := _summary_line(job)) != logged:
                self.log(line)
                logged = line
            if finished(job) or time.monotonic() > self.deadline:
                return job
            time.sleep(_LOOK_SECONDS)

    def _save(self, job: Object) -> None:
        """Save status and ledger, and the whole output of a job that is not complete."""
        name = job["metadata"]["name"]
        (self.folder / f"{name}.json").write_text(json.dumps(job, indent=2))
        folder = self.cluster.run_folder(name)
        if folder is not None and (folder / "ledger.jsonl").is_file():
            shutil.copyfile(folder / "ledger.jsonl", self._ledger(name))
        if folder is not None and not holds("Complete")(job):
            shutil.copytree(folder, self.folder / name, dirs_exist_ok=True)

    def _read_ledger(self, name: str) -> tuple[tuple[LedgerRecord, ...], str]:
        try:
            return tuple(read_ledger(self._ledger(name)).records), ""
        except OutputUnavailable as error:
            return (), str(error)

    def _ledger(self, name: str) -> Path:
        return self.folder / f"{name}.ledger.jsonl"


def _summary_line(job: Object) -> str:
    """Phase, attempt, plan, and the reasons of the last attempts."""
    seen = status(job)
    phase = seen.get("display", {}).get("phase", "Pending")
    ends = [ended["reason"] for ended in seen.get("attempts", []) if ended.get("reason")]
    generation = (seen.get("plan") or {}).get("generation", 1)
    after = f", after {', '.join(ends[-3:])}" if ends else ""
    return f"{job['metadata']['name']}: {phase}, attempt {attempt(job).get('number', 0)}, plan {generation}{after}"
