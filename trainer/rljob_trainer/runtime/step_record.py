"""The ledger record of a step, from the results of its phases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rljob_api.plan_change import Phase
from rljob_client.run_directory.records import ResponseStatistics, RewardStatistics, StepRecord
from rljob_memory.sample import MemorySample
from rljob_trainer.algorithms.advantages import groups_without_gradient
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.policy.config import UpdateResult
from rljob_trainer.rollout_batch import RolloutBatch


def step_record(
    attempt: int,
    batch: RolloutBatch,
    updates: Mapping[str, UpdateResult],
    memory: Mapping[str, Mapping[Phase, MemorySample]],
    clock: PartClock,
    *,
    engines_sleep: bool = False,
) -> StepRecord:
    """The record. `updates`: by actor name. `memory`: the result of `memory_by_phase`. `engines_sleep`: on the
    policy's GPU, during its update."""
    lengths = np.asarray([len(response) for response in batch.response_ids])
    rewards = batch.rewards.astype(np.float64)
    uniform = groups_without_gradient(batch) / len(batch.prompt_ids)
    on_device = any(update.memory.device_total_bytes for update in updates.values())
    asleep = {"asleep_engine_bytes": max(update.memory.others_bytes for update in updates.values())}
    return StepRecord(
        step=batch.step,
        attempt=attempt,
        reward=RewardStatistics(mean=rewards.mean(), std=rewards.std(), min=rewards.min(), max=rewards.max()),
        response=ResponseStatistics(
            mean_tokens=lengths.mean(), max_tokens=int(lengths.max()), clipped_ratio=float((~batch.finished).mean())
        ),
        seconds=clock.seconds,
        total_seconds=clock.total_seconds,
        tokens=batch.prompt_tokens + batch.response_tokens,
        metrics={
            **next(iter(updates.values())).metrics,
            **batch.metrics,
            "uniform_groups": uniform,
            "reward_errors": batch.reward_errors,
            "masked_responses": int((~batch.takes_part).sum()),
            **{
                f"rewards/{name}": float(np.nanmean(part.astype(np.float64)))
                for name, part in batch.reward_parts.items()
                if not np.isnan(part).all()
            },
            # A response of one token that has finished is only the end of the sequence.
            "empty_responses": int(((lengths == 0) | ((lengths == 1) & batch.finished)).sum()),
            "continued_responses": len(batch.continued),
            "continued_tokens": sum(batch.continued),
            **(asleep if engines_sleep else {}),
        },
        prompts_drawn=batch.prompts_drawn,
        memory_bytes={
            actor: {
                phase: sample.peak_reserved_bytes if on_device else sample.peak_rss_bytes
                for phase, sample in phases.items()
            }
            for actor, phases in memory.items()
        },
        memory_counts="device" if on_device else "host",
        weights_version=batch.step,
    )


def memory_by_phase(
    updates: Mapping[str, UpdateResult], engine_memory: Mapping[str, MemorySample]
) -> dict[str, dict[Phase, MemorySample]]:
    """Memory by actor name and by the phase in which its peaks were measured.

    `engine_memory` is empty if the rollouts came from the journal.
    """
    policy: dict[str, dict[Phase, MemorySample]] = {name: {"update": update.memory} for name, update in updates.items()}
    return policy | {name: {"rollout": sample} for name, sample in engine_memory.items()}
