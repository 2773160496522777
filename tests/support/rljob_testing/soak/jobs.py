"""The jobs of a soak: examples/digits.yaml with pods, GPUs, steps and injected failures drawn from the seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rljob_api.fault_injection import Fault
from rljob_api.plan_change import Role
from rljob_operator import labels
from rljob_testing.cluster.job_status import Object, digits
from rljob_testing.soak.job_kinds import KINDS, Failures, JobKind
from rljob_trainer.roles.faults import target_role

_STEPS = (60, 120, 200)
_MOST_FAILURES = 3

# A cluster that loses something every half minute takes more patience than the defaults have.
_PATIENCE = {"maxRestarts": 30, "maxAdjustments": 20, "maxHostMemory": "8Gi", "maxSharedMemory": "4Gi"}


def job_manifest(seed: int, stream: int, number: int) -> Object:
    """The manifest of job `number` in a stream; both count from 0."""
    chance = random.Random(f"{seed}/{stream}/{number}")
    name, kind, steps = f"soak-{stream}-{number}", chance.choice(KINDS), chance.choice(_STEPS)
    gpus = chance.choice(kind.gpus)
    faults = _faults(chance, kind.failures, steps // 2, kind.processes(gpus))
    template = {"spec": _pod(name, {fault.fault_class for fault in faults}, max(gpus, 1))}
    return digits(
        name,
        topology=kind.topology,
        algorithm={"steps": steps, "maxStaleness": kind.max_staleness, **_partial(kind)},
        checkpoint={"everySteps": chance.choice((5, 20))},
        policy={"replicas": kind.policy_pods, "gpusPerReplica": gpus, "template": template},
        recovery=_PATIENCE,
        faultInjection={"enabled": True, "faults": [fault.model_dump(by_alias=True) for fault in faults]},
        **_rollout(kind, gpus, template),
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


def _rollout(kind: JobKind, gpus: int, template: Object) -> Object:
    """The part of the spec about engines, and about pods that only engines run in, if there are any."""
    rollout: Object = {} if kind.tensor_parallel_size == 1 else {"tensorParallelSize": kind.tensor_parallel_size}
    if kind.rollout_pods:
        rollout |= {"replicas": kind.rollout_pods, "gpusPerReplica": gpus, "template": template}
    return {"rollout": rollout} if rollout else {}


def _partial(kind: JobKind) -> Object:
    """The part of the algorithm with which responses have different lengths, and the longest ones are left."""
    if kind.partial_rollout_prompts == 0:
        return {}
    prompts = kind.partial_rollout_prompts
    return {"partialRolloutPrompts": prompts, "ignoreEndOfSequence": False, "maxResponseTokens": 32}


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
