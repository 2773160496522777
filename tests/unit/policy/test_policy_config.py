"""The configuration of a policy, and the settings of roles that the memory plan decides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.job import RLJobSpec
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.algorithms.learning_rate import learning_rate_at
from rljob_trainer.hardware import Machine
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.role_settings import role_settings


@pytest.mark.parametrize(
    ("warmup_steps", "step", "expected"), [(0, 1, 0.5), (4, 1, 0.125), (4, 2, 0.25), (4, 4, 0.5), (4, 100, 0.5)]
)
def test_the_learning_rate_increases_linearly_during_the_warm_up(warmup_steps: int, step: int, expected: float) -> None:
    algorithm = AlgorithmSpec(steps=100, learning_rate=0.5, warmup_steps=warmup_steps)
    assert learning_rate_at(algorithm, step) == expected


def test_the_controller_can_describe_a_policy_without_torch() -> None:
    modules = ["policy.config", "algorithms.advantages", "algorithms.functions", "telemetry.memory"]
    imports = "; ".join(f"import rljob_trainer.{module}" for module in modules)
    check = f"{imports}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_roles_are_given_the_memory_plan() -> None:
    plan = memory_plan(micro_batch_tokens=2048, kv_cache_bytes=5 << 30, rollout_sleep="Level1")
    machine = Machine((80 << 30,), 256 << 30, 32)
    sections = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 5}}
    roles = role_settings(
        RLJobSpec.model_validate(sections),
        plan,
        model_dir=Path("/model"),
        output_dir=Path("/out"),
        hosts=RoleHosts(machine, machine, "cuda", 1, 1, "2.13.0", (), shared_memory_bytes=4 << 30, may_compile=True),
        parameters=10**9,
        allocator_environments={},
    )
    assert roles.policy.memory == plan
    assert (roles.rollout.kv_cache_bytes, roles.rollout.sleep_level) == (5 << 30, 1)
