"""The memory plan reaches the roles."""

from __future__ import annotations

from pathlib import Path

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.hardware import Machine
from rljob_trainer.roles.settings import RoleSettings
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.role_settings import role_settings

SPEC = RLJobSpec.model_validate(
    {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 5}}
)
_MACHINE = Machine((80 << 30,), 256 << 30, 32)
ONE_GPU = RoleHosts(
    _MACHINE,
    _MACHINE,
    "cuda",
    1,
    1,
    "2.13.0",
    bundles=None,
    shared_memory_bytes=4 << 30,
    may_compile=True,
)


def roles_under(plan: MemoryPlan) -> RoleSettings:
    return role_settings(
        SPEC,
        plan,
        model_dir=Path("/model"),
        output_dir=Path("/out"),
        hosts=ONE_GPU,
        parameters=10**9,
        allocator_environments={},
    )


def test_a_policy_rank_is_given_the_whole_plan() -> None:
    plan = memory_plan(micro_batch_tokens=2048, weight_export="ReservedBuffer")
    assert roles_under(plan).policy.memory == plan


def test_an_engine_takes_its_kv_cache_and_sleep_level_from_the_plan() -> None:
    rollout = roles_under(memory_plan(kv_cache_bytes=5 << 30, rollout_sleep="Level1")).rollout
    assert (rollout.kv_cache_bytes, rollout.sleep_level) == (5 << 30, 1)
