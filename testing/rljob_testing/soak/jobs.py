"""The jobs of a soak: examples/digits.yaml with steps, GPUs and injected failures drawn from the seed. Pure."""

from __future__ import annotations

import random
from typing import Any

from rljob_api.fault_injection import FaultClass, FaultPhase
from rljob_testing.cluster.job_status import Object, digits

_FAILURES: tuple[tuple[FaultClass, tuple[FaultPhase, ...]], ...] = (
    ("ActivationSpike", ("update",)),
    ("Fragmentation", ("update",)),
    ("AllocatorCache", ("update", "sync")),
    ("KVCacheOversized", ("load", "rollout")),
    ("WeightSyncSpike", ("sync",)),
    ("OptimizerState", ("optimizer",)),
    ("HostMemory", ("update", "rollout")),
    ("SharedMemory", ("sync", "rollout")),
    ("WorkerLost", ("load", "rollout", "update", "optimizer", "sync", "checkpoint")),
)
"""Failure classes that are injected, each with the phases to draw from."""

_STEPS = (60, 120, 200)
_GPUS = (0, 0, 1, 1, 2)
_MOST_FAILURES = 3

# A cluster that loses something every half minute takes more patience than the defaults have.
_PATIENCE = {"maxRestarts": 30, "maxAdjustments": 20, "maxHostMemory": "8Gi", "maxSharedMemory": "4Gi"}


def job_manifest(seed: int, stream: int, number: int) -> Object:
    """The manifest of job `number` in a stream; both count from 0."""
    chance = random.Random(f"{seed}/{stream}/{number}")
    steps, gpus = chance.choice(_STEPS), chance.choice(_GPUS)
    picked = chance.sample(_FAILURES, chance.randint(1, _MOST_FAILURES))
    failures = [_failure(class_, chance.choice(phases), chance.randint(1, steps // 2)) for class_, phases in picked]
    return digits(
        f"soak-{stream}-{number}",
        algorithm={"steps": steps},
        checkpoint={"everySteps": chance.choice((5, 20))},
        policy={"gpusPerReplica": gpus, "template": {"spec": _pod({class_ for class_, _ in picked}, max(gpus, 1))}},
        recovery=_PATIENCE,
        faultInjection={"enabled": True, "faults": failures},
    )


def _failure(class_: FaultClass, phase: FaultPhase, step: int) -> Object:
    """A role loads before step 1, and later only after another failure."""
    return {"class": class_, "phase": phase, "step": 1 if phase == "load" else step}


def _pod(classes: set[FaultClass], ranks: int) -> dict[str, Any]:
    """Limits of the worker's pod that the failures need."""
    pod: dict[str, Any] = {}
    if "SharedMemory" in classes:
        pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]
    if "HostMemory" in classes:
        pod["containers"] = [{"name": "rljob", "resources": {"limits": {"memory": f"{2 * ranks}Gi"}}}]
    return pod
