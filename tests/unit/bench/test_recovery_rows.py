"""Rows of jobs that ran out of memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bench.harness.recovery_rows import FailingJob, Run, line, merged, row_of, row_of_job
from bench.report.recoveries import table
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import DiagnosisStatus, PlanChange, RemedyStatus
from rljob_trainer.ledger.records import PlanChangeRecord, ResponseStatistics, RewardStatistics, StepRecord

JOB = FailingJob("kv_cache_oversized", "KVCacheOversized", {})
GIB = 1 << 30


def step(number: int, reward: float) -> StepRecord:
    return StepRecord(
        step=number,
        attempt=1,
        reward=RewardStatistics(mean=reward, std=0, min=reward, max=reward),
        response=ResponseStatistics(mean_tokens=4, max_tokens=4, clipped_ratio=0),
        seconds={"update": 1.0},
        total_seconds=1.0,
        tokens=4,
        weights_version=number,
        metrics={"grad_norm": 10 * reward},
    )


def plan_change(seconds: float | None) -> PlanChangeRecord:
    change = PlanChange(
        generation=2,
        time=datetime(2026, 1, 1, tzinfo=UTC),
        attempt=1,
        step=1,
        role="rollout",
        diagnosis=DiagnosisStatus(class_name="KVCacheOversized", confidence=0.75, message="too large"),
        remedy=RemedyStatus(
            setting="kvCache",
            before="9Gi",
            after="3Gi",
            expected_bytes=6 * GIB,
            observed_bytes=5 * GIB,
        ),
        level="RespawnRole",
        seconds_to_recover=seconds,
    )
    plan: dict[str, Any] = {
        "generation": 2,
        "empty_cache": True,
        "expandable_segments": True,
        "rollout_sleep": "Level2",
    }
    sizes = dict.fromkeys(("kv_cache_bytes", "micro_batch_tokens", "logprob_chunk_tokens", "sync_bucket_bytes"), 3)
    switches = {"activation_checkpointing": False, "optimizer_offload": False}
    parts = {} if seconds is None else {"processes": 8.0, "engine": 4.26, "sync": 0.01}
    return PlanChangeRecord(change=change, plan=MemoryPlan.model_validate(plan | sizes | switches), seconds=parts)


CALM = row_of(Run(0, 30.0, ledger=[step(1, 0.5), step(2, 0.75)]))


def test_a_recovery_has_its_remedy_seconds_and_bytes() -> None:
    done = Run(0, 50.0, {"attempts": 1}, [plan_change(None), plan_change(12.34), step(1, 0.5), step(2, 0.5)])
    row = row_of_job(JOB, "with", done, CALM, [])
    assert row["as_intended"]
    assert row["steps"] == 2
    assert row["seconds_lost"] == pytest.approx(12.3)
    assert row["largest_reward_difference"] == 0.25
    assert row["largest_gradient_norm_difference"] == 2.5
    assert row["injected"] is False
    assert [remedy["observed_bytes"] for remedy in row["remedies"]] == [5 * GIB]
    assert table([row]).splitlines()[-1] == (
        "| KVCacheOversized | kvCache: 3Gi (RespawnRole) | 2 | 1 | 12.3 | processes 8.0, engine 4.3 "
        "| 6.0 GiB | 5.0 GiB | 0.25 |"
    )


def test_an_injected_failure_is_marked() -> None:
    job = FailingJob("job", "OptimizerState", {}, faults=[{"class": "OptimizerState"}])
    row = row_of_job(job, "with", Run(0, 1.0, {"attempts": 1}), CALM, [])
    assert "| OptimizerState (injected) | none |" in table([row])


def test_newer_rows_replace_older_rows_of_the_same_job() -> None:
    def row(job: str, arm: str, seconds: int) -> dict[str, Any]:
        return {"job": job, "arm": arm, "seconds": seconds}

    earlier = [row("b", "with", 2), row("b", "without", 1), row("calm", "calm", 0)]
    later = [row("b", "without", 7), row("a", "without", 3), row("a", "with", 4)]
    assert [(each["job"], each["arm"], each["seconds"]) for each in merged(earlier, later)] == [
        ("calm", "calm", 0),
        ("a", "without", 3),
        ("a", "with", 4),
        ("b", "without", 7),
        ("b", "with", 2),
    ]


@pytest.mark.parametrize(
    ("ends", "exit_code", "as_intended"),
    [
        ("Complete", 0, True),
        ("Complete", 80, False),
        ("GiveUp", 80, True),
        ("GiveUp", 0, False),
        ("GiveUp", 1, False),
    ],
)
def test_a_job_that_does_not_end_as_intended_is_marked(ends: Any, exit_code: int, as_intended: bool) -> None:
    job = FailingJob("job", "ForeignProcess", {}, ends=ends)
    row = row_of_job(job, "with", Run(exit_code, 1.0), CALM, [])
    assert row["as_intended"] is as_intended
    assert ("NOT AS INTENDED" in line(row)) is not as_intended


@pytest.mark.parametrize(("exit_code", "as_intended"), [(80, True), (81, True), (0, False), (1, False), (None, False)])
def test_without_recovery_only_out_of_memory_is_as_intended(exit_code: int | None, as_intended: bool) -> None:
    assert row_of_job(JOB, "without", Run(exit_code, 1.0), CALM, [])["as_intended"] is as_intended
