"""Results of a soak: complete jobs, delays by faults, problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.report.soak import block
from rljob_testing.soak.faults import Fault
from rljob_testing.soak.job_stream import JobOutcome
from rljob_testing.soak.report import Footprint, Soak, problems, row, seconds_to_next_step
from rljob_trainer.ledger.records import FaultRecord, ResponseStatistics, RewardStatistics, StepRecord

MEBIBYTE = 1 << 20
COLOCATED: dict[str, Any] = {
    "topology": "Colocated",
    "algorithm": {"steps": 3, "maxStaleness": 0},
    "policy": {"replicas": 1, "gpusPerReplica": 1},
    "rollout": {},
}
DISAGGREGATED: dict[str, Any] = {
    "topology": "Disaggregated",
    "algorithm": {"steps": 3, "maxStaleness": 1},
    "rollout": {"replicas": 2},
}


def step(number: int, committed_at: float) -> StepRecord:
    return StepRecord(
        step=number,
        attempt=1,
        reward=RewardStatistics(mean=0.5, std=0, min=0, max=1),
        response=ResponseStatistics(mean_tokens=4, max_tokens=4, clipped_ratio=0),
        seconds={},
        total_seconds=1,
        tokens=4,
        weights_version=number,
        committed_at=committed_at,
    )


def outcome(
    name: str, commits: Sequence[float], *, ended: str = "Complete", message: str = "", **spec: Any
) -> JobOutcome:
    """A job of three steps."""
    conditions = [{"type": ended, "status": "True", "reason": "Because", "message": message}]
    attempts = [{"reason": "WorkerLost"}, {"reason": "AllStepsCommitted"}]
    changes = [{"remedy": {"setting": "emptyCache"}, "level": "Live", "secondsToRecover": 2.0}]
    job: dict[str, Any] = {
        "metadata": {"name": name},
        "spec": COLOCATED | spec,
        "status": {"conditions": conditions, "attempts": attempts, "planChanges": changes},
    }
    given = FaultRecord(attempt=1, fault_class="AllocatorCache", phase="sync", step=1, rank=0)
    return JobOutcome(job, (given, *(step(n, at) for n, at in enumerate(commits, 1))), "", 60.0)


def soak(**changes: Any) -> Soak:
    idle = Footprint(disk_bytes=100 * MEBIBYTE, operator_bytes=80 * MEBIBYTE)
    well = Soak(
        seed=1,
        minutes=3,
        streams=2,
        seconds=240,
        outcomes=[outcome("a", [10, 20, 30]), outcome("b", [12, 22, 32])],
        faults=[Fault("KillKubelet", 11, "kubelet (cpu-node)", ("a", "b")), Fault("KillProcess", 25, "raylet", ("a",))],
        before=idle,
        after=idle,
        leaks=(),
        kubernetes="v1.36.3",
    )
    return replace(well, **changes)


def test_a_successful_soak_is_recorded_without_problems() -> None:
    recorded = row(soak())
    assert recorded["problems"] == []
    assert (recorded["jobs"], recorded["complete"], recorded["steps"]) == (2, 2, 6)
    assert recorded["faults"] == {"KillKubelet": 1, "KillProcess": 1}
    assert recorded["injected_failures"] == {"AllocatorCache@sync": 2}
    assert recorded["attempts"] == {"WorkerLost": 2, "AllStepsCommitted": 2}
    assert recorded["plan_changes"] == {"emptyCache": 2}
    assert recorded["recovery_seconds_by_fault"]["KillKubelet"] == {"count": 1, "median": 9.0, "worst": 9.0}
    assert recorded["recovery_seconds_by_level"] == {"Live": {"count": 2, "median": 2.0, "worst": 2.0}}


def test_jobs_are_counted_by_topology_and_worker_pods() -> None:
    in_two_pods = COLOCATED | {"policy": {"replicas": 2, "gpusPerReplica": 0}}
    jobs = [
        outcome("a", [10, 20, 30]),
        outcome("b", [10, 20, 30]),
        outcome("c", [10, 20, 30], **in_two_pods),
        outcome("d", [10, 20], ended="Failed", **DISAGGREGATED),
    ]
    recorded = row(soak(outcomes=jobs))
    assert recorded["jobs_by_kind"] == {
        "Colocated, 1 policy": {"jobs": 2, "complete": 2, "steps": 6, "injected_failures": 2},
        "Colocated, 2 policy": {"jobs": 1, "complete": 1, "steps": 3, "injected_failures": 1},
        "Disaggregated, 1 policy, 2 rollout, maxStaleness: 1": {
            "jobs": 1,
            "complete": 0,
            "steps": 2,
            "injected_failures": 1,
        },
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"outcomes": [outcome("a", [1, 2], ended="Failed", message="too little memory")]}, "too little memory"),
        ({"outcomes": [outcome("a", [1, 2], ended="Running")]}, "had not ended"),
        ({"outcomes": [outcome("a", [1, 2])]}, "expected steps 1 to 3, each once, found 2"),
        ({"outcomes": [replace(outcome("a", [1, 2, 3]), ledger_error="line 7 is torn")]}, "line 7 is torn"),
        ({"leaks": ["mount of pod 1"]}, "leaked: mount of pod 1"),
        ({"after": Footprint(200 * MEBIBYTE, 80 * MEBIBYTE)}, "disk in use grew"),
        ({"after": Footprint(100 * MEBIBYTE, 130 * MEBIBYTE)}, "the operator's memory grew"),
    ],
)
def test_each_problem_is_reported(changes: dict[str, Any], expected: str) -> None:
    [problem] = problems(soak(**changes))
    assert expected in problem


def test_a_fault_lasts_until_all_disturbed_jobs_commit_again() -> None:
    jobs = [outcome("a", [10, 20, 30]), outcome("b", [10, 50, 60]), outcome("undisturbed", [10, 90, 95])]
    assert seconds_to_next_step(Fault("KillEtcd", 15, "etcd", ("a", "b")), jobs) == 35


def test_a_fault_after_the_last_step_delays_nothing() -> None:
    late = Fault("DeletePod", 31, "a-controller", ("a",))
    assert seconds_to_next_step(late, [outcome("a", [10, 20, 30])]) is None
    assert row(soak(faults=[late]))["recovery_seconds_by_fault"] == {}


def test_the_block_shows_a_recorded_soak() -> None:
    script = {"script": "bench/programs/soak.py", "versions": {}}
    text = block({"rows": [row(soak())], "date": "2026-01-01", "device": "two cores", **script})
    assert "`python -m bench.programs.soak`, 2026-01-01, two cores." in text
    assert "| **complete** | **2 of 2 jobs** |" in text
    assert "| steps, each committed once | 6 |" in text
    assert "| Colocated, 1 policy | 2 | 2 | 6 | 2 |" in text
    assert "| `KillKubelet` | 1 | 9 | 9 |" in text
    assert "| `Live` | 2 | 2 | 2 |" in text
    assert "networks | none |" in text
    assert "2 × `WorkerLost`" in text
