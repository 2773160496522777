"""A setting that the user pins after a failure holds from the next attempt on."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_settings import MemorySettings
from rljob_memory.recovery.pins import with_pins
from rljob_testing.memory_plans import memory_plan

PLAN = memory_plan(generation=3)


def next_plan(memory: dict[str, Any], *, shares_gpu: bool | None = True) -> MemoryPlan:
    return with_pins(PLAN, MemorySettings.model_validate(memory), shares_gpu=shares_gpu)


@pytest.mark.parametrize(
    ("memory", "changed"),
    [
        ({"detachMetrics": "Disabled"}, {"detach_metrics": False}),
        ({"weightExport": "ReservedBuffer"}, {"weight_export": "ReservedBuffer"}),
        ({"syncBucketSize": "64Mi"}, {"sync_bucket_bytes": 64 << 20}),
    ],
)
def test_a_newly_pinned_value_raises_the_generation(memory: dict[str, Any], changed: dict[str, Any]) -> None:
    assert next_plan(memory) == PLAN.model_copy(update={"generation": 4, **changed})


@pytest.mark.parametrize("memory", [{}, {"detachMetrics": "Enabled"}, {"weightExport": "SwitchSegments"}])
def test_a_setting_pinned_to_its_present_value_changes_nothing(memory: dict[str, Any]) -> None:
    assert next_plan(memory) == PLAN


def test_an_engine_that_shares_no_gpu_stays_awake_despite_pins() -> None:
    awake = next_plan({"rolloutSleep": "Level1"}, shares_gpu=False)
    assert awake == PLAN.model_copy(update={"generation": 4, "rollout_sleep": "Disabled"})
    assert with_pins(awake, MemorySettings(rollout_sleep="Level1"), shares_gpu=False) == awake


def test_a_pinned_sleep_level_waits_until_the_devices_are_known() -> None:
    assert next_plan({"rolloutSleep": "Level1"}, shares_gpu=None) == PLAN
