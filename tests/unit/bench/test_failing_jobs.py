"""The jobs of tests/gpu/jobs can be run: their manifest, plans and faults are what the trainer takes."""

from __future__ import annotations

import pytest
import yaml

from bench.recovered_jobs import JOBS, read_jobs
from bench.recovery_rows import FailingJob
from rljob_api.fault_injection import FaultInjection
from rljob_api.manifest import load_manifest
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.diagnosis import FailureClass

GOOD_PLAN = yaml.safe_load((JOBS / "plan.yaml").read_text())
FAILING = read_jobs(JOBS, GOOD_PLAN)


def test_the_manifest_is_valid() -> None:
    assert load_manifest(JOBS / "manifest.yaml").spec.memory.mode == "Auto"


@pytest.mark.parametrize("job", FAILING, ids=[job.name for job in FAILING])
def test_a_job_fails_by_its_plan_by_a_neighbour_or_by_a_fault(job: FailingJob) -> None:
    MemoryPlan.model_validate(job.plan)
    FaultInjection.model_validate({"enabled": True, "faults": list(job.faults)})
    assert FailureClass(job.failure_class)
    assert job.plan != GOOD_PLAN or job.ballast_gib or job.faults


def test_the_classes_that_one_machine_can_recover_from_are_there() -> None:
    recoverable = {job.failure_class for job in FAILING if job.ends == "Complete"}
    assert recoverable == {
        "ActivationSpike",
        "AllocatorCache",
        "EngineNotAsleep",
        "Fragmentation",
        "KVCacheOversized",
        "OptimizerState",
        "RetainedGraph",
        "WeightSyncSpike",
    }
