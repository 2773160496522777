"""Changes for an adapter: relative to the first plan, and only settings that the adapter maps."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_memory.next_plan import adapter_changes, other_trainers_first_plan


def spec(adapter: str | None = "TRL", **memory: Any) -> RLJobSpec:
    trainer = {"image": "trl:1", **({"adapter": adapter} if adapter else {})}
    given = {
        "model": {"uri": "hf://org/name"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 3},
        "memory": memory,
        "trainer": trainer,
    }
    return RLJobSpec.model_validate(given, by_alias=True, by_name=False)


def changes(given: RLJobSpec, **plan: Any) -> dict[str, object]:
    return adapter_changes(given, other_trainers_first_plan(given).model_copy(update=plan))


@pytest.mark.parametrize("adapter", ["TRL", "Verl"])
def test_the_first_plan_changes_nothing(adapter: str) -> None:
    assert changes(spec(adapter)) == {}
    assert changes(spec(adapter, microBatchTokens=512, kvCache="2Gi")) == {}


def test_sizes_are_shares_of_the_first_plan() -> None:
    first = other_trainers_first_plan(spec())
    plan = {"micro_batch_tokens": first.micro_batch_tokens // 4, "kv_cache_bytes": first.kv_cache_bytes * 3 // 4}
    assert changes(spec(), **plan) == {"microBatchTokens": 0.25, "kvCache": 0.75}


def test_switches_count_if_a_remedy_or_the_user_switched_them_on() -> None:
    assert changes(spec(), activation_checkpointing=True, rollout_sleep="Level1") == {
        "activationCheckpointing": True,
        "rolloutSleep": "Level1",
    }
    assert changes(spec("Verl", optimizerOffload="Enabled")) == {"optimizerOffload": True}


def test_settings_that_the_adapter_does_not_map_are_left_out() -> None:
    assert changes(spec("TRL"), optimizer_offload=True, sync_bucket_bytes=1 << 20) == {}
    assert changes(spec("Verl"), empty_cache=True) == {}


def test_without_an_adapter_there_are_no_changes() -> None:
    assert changes(spec(None), micro_batch_tokens=1) == {}
