"""What the user pins after a failure holds from the next attempt on."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_operator.reconcile.memory_plan import plan_for_next_attempt

PLAN = MemoryPlan(
    generation=3,
    empty_cache=True,
    expandable_segments=True,
    rollout_sleep_level=2,
    kv_cache_bytes=1 << 30,
    micro_batch_tokens=4096,
    logprob_chunk_tokens=512,
    activation_checkpointing=False,
    optimizer_offload=False,
    sync_bucket_bytes=1 << 28,
)


def next_plan(memory: dict[str, Any]) -> MemoryPlan | None:
    sections = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 5}}
    return plan_for_next_attempt(RLJobSpec.model_validate(sections | {"memory": memory}), PLAN)


@pytest.mark.parametrize(
    ("memory", "changed"),
    [
        ({"detachMetrics": "Disabled"}, {"detach_metrics": False}),
        ({"weightExport": "ReservedBuffer"}, {"weight_export": "ReservedBuffer"}),
        ({"syncBucketSize": "64Mi"}, {"sync_bucket_bytes": 64 << 20}),
    ],
)
def test_a_setting_pinned_to_another_value_makes_a_plan_of_the_next_generation(
    memory: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert next_plan(memory) == PLAN.model_copy(update={"generation": 4, **changed})


@pytest.mark.parametrize("memory", [{}, {"detachMetrics": "Enabled"}, {"weightExport": "SwitchSegments"}])
def test_a_setting_pinned_to_the_value_it_has_leaves_the_plan_as_it_is(memory: dict[str, Any]) -> None:
    assert next_plan(memory) == PLAN
