"""Contents of the StepReport after a step and after a failure."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from rljob_api.plan_change import Phase
from rljob_api.step_report import MAX_RANKS_REPORTED, StepReport, StepReportStatus
from rljob_memory.sample import MemorySample
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.step_report.client import encoded
from rljob_trainer.step_report.content import memory_of_ranks, reward_of, seconds_of
from tests.unit.ledger.samples import step_record

PLAN = memory_plan()

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def sample(free: int = 10, peak_rss: int = 7) -> MemorySample:
    return MemorySample(
        allocated_bytes=1, reserved_bytes=2, peak_allocated_bytes=3, peak_reserved_bytes=4,
        device_free_bytes=free, device_total_bytes=80, rss_bytes=6, peak_rss_bytes=peak_rss,
        alloc_retries=5, outside_torch_bytes=8, asleep_bytes=9,
        host_used_bytes=11, host_limit_bytes=12, oom_kills=13,
        shared_memory_used_bytes=14, shared_memory_bytes=15,
    )  # fmt: skip


def test_each_process_is_reported_with_the_phase_of_its_peaks() -> None:
    [policy, rollout] = memory_of_ranks({"policy-1": {"update": sample()}, "rollout-0": {"rollout": sample()}})
    assert (policy.role, policy.rank, policy.phase) == ("policy", 1, "update")
    assert (rollout.role, rollout.rank, rollout.phase) == ("rollout", 0, "rollout")
    assert policy.model_dump(exclude={"role", "rank", "phase"}) == {
        "allocated_bytes": 1,
        "reserved_bytes": 2,
        "peak_allocated_bytes": 3,
        "peak_reserved_bytes": 4,
        "device_free_bytes": 10,
        "device_total_bytes": 80,
        "outside_torch_bytes": 8,
        "asleep_bytes": 9,
        "alloc_retries": 5,
        "peak_rss_bytes": 7,
        "host_used_bytes": 11,
        "host_limit_bytes": 12,
        "oom_kills": 13,
        "shared_memory_used_bytes": 14,
        "shared_memory_bytes": 15,
    }


def test_of_too_many_processes_those_with_least_memory_are_reported() -> None:
    ranks = range(MAX_RANKS_REPORTED + 50)
    reported = memory_of_ranks({f"policy-{rank}": {"update": sample(free=1000 - rank)} for rank in ranks})
    assert len(reported) == MAX_RANKS_REPORTED
    assert {entry.rank for entry in reported} == set(range(50, MAX_RANKS_REPORTED + 50))


def test_a_reward_that_is_not_a_number_is_omitted() -> None:
    assert reward_of(step_record(1, reward=0.25)) == 0.25
    assert reward_of(step_record(1, reward=float("nan"))) is None


def test_absent_phases_of_a_step_took_no_time() -> None:
    seconds = seconds_of(step_record(1))
    assert (seconds.rollout, seconds.update, seconds.checkpoint) == (0.6, 0.3, 0.0)


def test_the_report_is_sent_without_defaults() -> None:
    report = StepReportStatus(attempt=1, step=0, plan=PLAN, update_time=NOW)
    sent = json.loads(encoded("digits", report))
    assert sent["metadata"] == {"name": "digits"}, "an apply would claim, or clear, whatever else stood here"
    assert sent["kind"] == "StepReport"
    assert sent["status"]["step"] == 0
    assert "reward" not in sent["status"]
    assert StepReport.model_validate_json(encoded("digits", report)).status == report


def test_a_report_of_eight_gpus_is_small() -> None:
    sizes: dict[str, Any] = {field.name: 80 * 2**30 - index for index, field in enumerate(fields(MemorySample)[5:])}
    gpu = MemorySample(**sizes)
    phases: dict[str, Phase] = {"policy": "update", "rollout": "rollout"}
    memory = {f"{role}-{rank}": {phase: gpu} for rank in range(8) for role, phase in phases.items()}
    report = StepReportStatus(attempt=1, step=9, plan=PLAN, memory=memory_of_ranks(memory))
    assert len(encoded("digits", report)) < 11_000
