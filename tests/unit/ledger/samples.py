"""Records and rollouts of an invented run, for tests of the ledger, the display and the plots."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from rljob_api.evaluation import EvaluationScore
from rljob_api.plan_change import DiagnosisStatus, PlanChange, RemedyStatus
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import (
    EvaluationRecord,
    PlanChangeRecord,
    ResponseStatistics,
    RewardStatistics,
    StepRecord,
)
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.rollout_batch import RolloutBatch

GIB = 2**30
PLAN = memory_plan(logprob_chunk_tokens=8192)


def step_record(step: int, reward: float = 0.5, **changes: Any) -> StepRecord:
    """A committed step of one second: 0.6 s rollout, 0.3 s update, 0.1 s between the phases; 1,000 tokens."""
    values: dict[str, Any] = {
        "step": step,
        "attempt": 1,
        "reward": RewardStatistics(mean=reward, std=0.1, min=0.0, max=1.0),
        "response": ResponseStatistics(mean_tokens=3.25, max_tokens=8, clipped_ratio=0.25),
        "seconds": {"rollout": 0.6, "update": 0.3},
        "total_seconds": 1.0,
        "tokens": 1000,
        "metrics": {"loss": 0.25},
        "memory_bytes": {"policy-0": {"update": GIB}, "rollout-0": {"rollout": 2 * GIB}},
        "memory_counts": "device",
        "weights_version": step,
        "committed_at": 1000.0 + step,
    }
    return StepRecord(**{**values, **changes})


def evaluation_record(step: int, reward: float, best: tuple[int, float] | None = None) -> EvaluationRecord:
    """An evaluation of ten prompts in two seconds. `best`: step and reward of the best one; by default, this one."""
    best_step, best_reward = best or (step, reward)
    metrics = {"reward_mean": reward, "avg@1": reward, "pass@1": reward, "response_mean_tokens": 3.25}
    return EvaluationRecord(
        attempt=1,
        step=step,
        prompts=10,
        samples_per_prompt=1,
        metrics=metrics,
        seconds=2.0,
        best=EvaluationScore(step=best_step, metric="reward_mean", score=best_reward),
        evaluated_at=1000.5 + step,
    )


def plan_change(
    generation: int, *, step: int = 1, seconds: float | None = None, preventive: bool = False
) -> PlanChange:
    """A change to smaller micro-batches after a failed update. `seconds`: until the retry succeeded."""
    return PlanChange(
        generation=generation,
        time=datetime(2026, 1, 2, tzinfo=UTC),
        attempt=1,
        step=step,
        phase="update",
        role="policy",
        diagnosis=DiagnosisStatus(class_name="ActivationSpike", confidence=0.8, message="Too much."),
        remedy=RemedyStatus(setting="microBatchTokens", before="4096", after="2048"),
        level="Live",
        preventive=preventive,
        seconds_to_recover=seconds,
    )


def plan_change_record(
    generation: int, micro_batch_tokens: int = 2048, seconds: float | None = None
) -> PlanChangeRecord:
    plan = PLAN.model_copy(update={"generation": generation, "micro_batch_tokens": micro_batch_tokens})
    return PlanChangeRecord(change=plan_change(generation, seconds=seconds), plan=plan)


def write_ledger(directory: Path, rewards: list[float]) -> Path:
    """Write a run whose steps have these mean rewards."""
    directory.mkdir(parents=True, exist_ok=True)
    with Ledger(directory / "ledger.jsonl") as ledger:
        ledger.begin_attempt(started_at=990.0, versions={"torch": "2"}, plan={"generation": 0}, processes={})
        for step, reward in enumerate(rewards, start=1):
            ledger.commit(step_record(step, reward))
    return directory / "ledger.jsonl"


def rollout_batch(step: int, response_tokens: int = 5) -> RolloutBatch:
    """One prompt, two completions; the second is empty."""
    return RolloutBatch(
        step=step,
        group_size=2,
        prompt_ids=[np.arange(3, dtype=np.int32)],
        response_ids=[np.arange(response_tokens, dtype=np.int32), np.zeros(0, np.int32)],
        rollout_logprobs=[np.linspace(-2, -1, response_tokens, dtype=np.float32), np.zeros(0, np.float32)],
        finished=np.array([True, False]),
        rewards=np.array([1.0, 0.0], np.float32),
        advantages=np.array([0.5, -0.5], np.float32),
    )
