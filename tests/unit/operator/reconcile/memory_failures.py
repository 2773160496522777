"""Jobs whose trainer has reported its plan, and the ways in which they run out of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.step_report import Evidence
from rljob_testing.memory_plans import memory_facts
from rljob_testing.simulated_cluster import CONTROLLER, CPU_NODE, GPU_NODE, PLAN, SimulatedCluster, running_job

GIB = 1 << 30
FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 2.40 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory 60.00 GiB "
    "is allocated by PyTorch, and 6.10 GiB is reserved by PyTorch but unallocated."
)
FACTS = memory_facts(host_memory_bytes=64 * GIB, shared_memory_bytes=0)
KNOWING = tuple(replace(node, restarts_in_place=True) for node in (CPU_NODE, GPU_NODE))
PENDING = {"exitCode": 80, "message": "policy-1 ran out"}


def running(step: int = 3, *, limit: str = "", **spec: Any) -> SimulatedCluster:
    """A job whose trainer has reported its plan. `limit`: host memory of the workers."""
    if limit:
        container = {"name": "rljob", "resources": {"limits": {"memory": limit}}}
        spec["policy"] = {"replicas": 2, "template": {"spec": {"containers": [container]}}}
    return running_job(**spec).tick(10).reports(step, memory_facts=FACTS, phase="update").settled()


def evidence(cluster: SimulatedCluster, **overrides: Any) -> Evidence:
    values = {"time": cluster.now, "attempt": cluster.attempt.number, "role": "policy", "rank": 1, "step": 4}
    return Evidence.model_validate(values | {"phase": "update", "message": FRAGMENTED} | overrides)


def trainers_change(cluster: SimulatedCluster, generation: int = 2, **overrides: Any) -> PlanChange:
    values = {
        "generation": generation,
        "time": cluster.now,
        "attempt": 1,
        "step": 4,
        "phase": "update",
        "role": "policy",
        "diagnosis": {"class": "ActivationSpike", "confidence": 0.9, "message": "one pass needs more than is left"},
        "remedy": {"setting": "microBatchTokens", "before": "4096", "after": "2048", "expectedBytes": 2 * GIB},
        "level": "Live",
    }
    return PlanChange.model_validate(values | overrides)


def run_out(
    cluster: SimulatedCluster, step: int = 3, code: int = ExitCode.DEVICE_OUT_OF_MEMORY, **overrides: Any
) -> SimulatedCluster:
    """Let the controller end for memory. `overrides`: of its evidence."""
    found = evidence(cluster, **{"step": step + 1} | overrides)
    return cluster.end(CONTROLLER, code, message="policy-1 ran out", step=step, evidence=found)


def waiting(nodes: Any = KNOWING, plan: MemoryPlan = PLAN, facts: MemoryFacts = FACTS, **spec: Any) -> SimulatedCluster:
    """A job whose controller cannot continue and waits for a changed plan."""
    cluster = running_job(**spec, nodes=nodes).tick(10)
    found = evidence(cluster)
    return cluster.reports(3, plan=plan, memory_facts=facts, last_evidence=found, pending_exit=PENDING)
