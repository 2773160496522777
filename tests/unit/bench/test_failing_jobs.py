"""The jobs of bench/programs/failing_jobs are valid: manifest, plans and faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bench.harness.recovery_rows import FailingJob
from bench.programs.recovered_jobs import JOBS, read_jobs, recorded_rows, unrecorded
from rljob_api.fault_injection import FaultInjection
from rljob_api.manifest import load_manifest
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.diagnosis import FailureClass

GOOD_PLAN = yaml.safe_load((JOBS / "plan.yaml").read_text())
FAILING = read_jobs(JOBS, GOOD_PLAN)
REHEARSAL = JOBS / "rehearsal"
REHEARSED_PLAN = yaml.safe_load((REHEARSAL / "plan.yaml").read_text())


@pytest.mark.parametrize("jobs", [JOBS, REHEARSAL], ids=["jobs", "rehearsal"])
def test_the_manifest_is_valid(jobs: Path) -> None:
    assert load_manifest(jobs / "manifest.yaml").spec.memory.mode == "Auto"


@pytest.mark.parametrize("job", read_jobs(REHEARSAL, REHEARSED_PLAN), ids=lambda job: job.name)
def test_a_rehearsed_job_needs_no_gpu(job: FailingJob) -> None:
    MemoryPlan.model_validate(job.plan)
    FaultInjection.model_validate({"enabled": True, "faults": list(job.faults)})
    assert job.faults
    assert not job.ballast_gib


def test_recorded_jobs_are_not_run_again(tmp_path: Path) -> None:
    assert recorded_rows(tmp_path) == []
    rows = [{"job": "calm", "arm": "calm"}, {"job": "activation_spike", "arm": "with"}]
    (tmp_path / "recovered_jobs.json").write_text(json.dumps({"rows": rows}))
    assert recorded_rows(tmp_path) == rows
    assert unrecorded(REHEARSAL, REHEARSED_PLAN, rows) == {"optimizer_state"}


@pytest.mark.parametrize("job", FAILING, ids=[job.name for job in FAILING])
def test_a_job_fails_by_its_plan_a_foreign_process_or_a_fault(job: FailingJob) -> None:
    MemoryPlan.model_validate(job.plan)
    FaultInjection.model_validate({"enabled": True, "faults": list(job.faults)})
    assert FailureClass(job.failure_class)
    assert job.plan != GOOD_PLAN or job.ballast_gib or job.faults


def test_every_class_that_one_machine_can_recover_has_a_job() -> None:
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
