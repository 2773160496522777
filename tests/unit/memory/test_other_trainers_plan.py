"""The first plan of a job of another trainer: pinned settings hold, the rest is where remedies can start from."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_memory.next_plan import other_trainers_first_plan


def spec(memory: dict[str, Any] | None = None, **algorithm: Any) -> RLJobSpec:
    given = {
        "model": {"uri": "hf://org/name"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 3, **algorithm},
        "memory": memory or {},
        "trainer": {"image": "trl:1"},
    }
    return RLJobSpec.model_validate(given, by_alias=True, by_name=False)


def test_only_requested_settings_are_switched_on() -> None:
    plan = other_trainers_first_plan(spec())
    assert plan.generation == 1
    switches = (plan.empty_cache, plan.expandable_segments, plan.activation_checkpointing, plan.optimizer_offload)
    assert not any(switches)
    assert plan.rollout_sleep_level == 0
    assert plan.host_memory_bytes is None


@pytest.mark.parametrize(
    ("memory", "setting", "value"),
    [
        ({"microBatchTokens": 512}, "micro_batch_tokens", 512),
        ({"kvCache": "2Gi"}, "kv_cache_bytes", 2 << 30),
        ({"rolloutSleep": "Level2"}, "rollout_sleep", "Level2"),
        ({"expandableSegments": "Enabled"}, "expandable_segments", True),
        ({"syncBucketSize": "64Mi"}, "sync_bucket_bytes", 64 << 20),
        ({"detachMetrics": "Disabled"}, "detach_metrics", False),
    ],
)
def test_pinned_settings_are_kept(memory: dict[str, Any], setting: str, value: object) -> None:
    assert getattr(other_trainers_first_plan(spec(memory)), setting) == value


def test_a_micro_batch_starts_as_a_step_and_fits_the_longest_sequence() -> None:
    small = spec(promptsPerStep=2, groupSize=2, maxPromptTokens=10, maxResponseTokens=20)
    long = spec(maxPromptTokens=30_000, maxResponseTokens=10_000)
    assert other_trainers_first_plan(small).micro_batch_tokens == 120
    assert other_trainers_first_plan(long).micro_batch_tokens == 40_000
