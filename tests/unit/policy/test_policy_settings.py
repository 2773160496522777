"""Every setting of the memory plan that bears on the policy reaches it."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.hardware import Machine
from rljob_trainer.policy.config import PolicyMemory
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.role_settings import role_settings

SPEC = RLJobSpec.model_validate(
    {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 5}}
)
ONE_GPU = RoleHosts(
    Machine((80 << 30,), 256 << 30, 32),
    "cuda",
    1,
    "2.13.0",
    bundles=None,
    shared_memory_bytes=4 << 30,
    may_compile=True,
)
PLAN = memory_plan()


def policy_memory(plan: MemoryPlan) -> PolicyMemory:
    settings = role_settings(
        SPEC,
        plan,
        model_dir=Path("/model"),
        output_dir=Path("/out"),
        hosts=ONE_GPU,
        parameters=10**9,
        allocator_environments={},
    )
    return settings.policy.memory


@pytest.mark.parametrize("name", [field.name for field in fields(PolicyMemory)])
def test_a_change_of_the_plan_changes_that_setting_of_the_policy_and_no_other(name: str) -> None:
    value = getattr(PLAN, name)
    other = "ReservedBuffer" if name == "weight_export" else not value if isinstance(value, bool) else value + 1
    before, after = (asdict(policy_memory(plan)) for plan in (PLAN, PLAN.model_copy(update={name: other})))
    assert after == before | {name: other}
