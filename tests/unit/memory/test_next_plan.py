"""Another trainer: its first plan, where remedies can start from, and the changes that its adapter gets."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_memory.next_plan import adapter_changes, other_trainers_first_plan
from rljob_memory.plan_settings import texts_of


def spec(adapter: str | None = None, memory: dict[str, Any] | None = None, **algorithm: Any) -> RLJobSpec:
    given = {
        "model": {"uri": "hf://org/name"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 3, **algorithm},
        "memory": memory or {},
        "trainer": {"image": "trl:1", **({"adapter": adapter} if adapter else {})},
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
    ("setting", "value"),
    [
        ("microBatchTokens", 512),
        ("kvCache", "2Gi"),
        ("rolloutSleep", "Level2"),
        ("expandableSegments", "Enabled"),
        ("syncBucketSize", "64Mi"),
        ("detachMetrics", "Disabled"),
    ],
)
def test_pinned_settings_are_kept(setting: str, value: object) -> None:
    assert texts_of(other_trainers_first_plan(spec(memory={setting: value})))[setting] == str(value)


def test_engines_have_the_gpus_of_the_manifest() -> None:
    job = spec()
    assert other_trainers_first_plan(job).tensor_parallel_size == 1, "Auto"
    two = job.model_copy(update={"rollout": job.rollout.model_copy(update={"tensor_parallel_size": 2})})
    assert other_trainers_first_plan(two).tensor_parallel_size == 2


def test_a_micro_batch_starts_as_a_step_and_fits_the_longest_sequence() -> None:
    small = spec(promptsPerStep=2, groupSize=2, maxPromptTokens=10, maxResponseTokens=20)
    long = spec(maxPromptTokens=30_000, maxResponseTokens=10_000)
    assert other_trainers_first_plan(small).micro_batch_tokens == 120
    assert other_trainers_first_plan(long).micro_batch_tokens == 40_000


FIRST = other_trainers_first_plan(spec("TRL"))


@pytest.mark.parametrize(
    ("adapter", "memory", "plan", "changes"),
    [
        ("TRL", {}, {}, {}),
        ("Verl", {}, {}, {}),
        ("TRL", {"microBatchTokens": 512, "kvCache": "2Gi"}, {}, {}),
        # sizes are shares of the first plan
        (
            "TRL",
            {},
            {"micro_batch_tokens": FIRST.micro_batch_tokens // 4, "kv_cache_bytes": FIRST.kv_cache_bytes * 3 // 4},
            {"microBatchTokens": 0.25, "kvCache": 0.75},
        ),
        # switches count if a remedy or the user switched them on
        (
            "TRL",
            {},
            {"activation_checkpointing": True, "rollout_sleep": "Level1"},
            {"activationCheckpointing": True, "rolloutSleep": "Level1"},
        ),
        ("Verl", {"optimizerOffload": "Enabled"}, {}, {"optimizerOffload": True}),
        ("Verl", {"optimizerOffload": "50%"}, {}, {"optimizerOffload": True}),
        # settings that the adapter does not map, and no adapter
        ("TRL", {}, {"optimizer_offload": True, "sync_bucket_bytes": 1 << 20}, {}),
        ("Verl", {}, {"empty_cache": True}, {}),
        (None, {}, {"micro_batch_tokens": 1}, {}),
    ],
)
def test_an_adapter_gets_what_changed_since_the_first_plan(
    adapter: str | None, memory: dict[str, Any], plan: dict[str, Any], changes: dict[str, object]
) -> None:
    given = spec(adapter, memory)
    assert adapter_changes(given, other_trainers_first_plan(given).model_copy(update=plan)) == changes
