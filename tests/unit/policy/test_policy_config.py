from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.memory_plans import memory_plan
from rljob_trainer.policy.config import PolicyConfig


@pytest.mark.parametrize(
    ("warmup_steps", "step", "expected"), [(0, 1, 8.0), (4, 1, 2.0), (4, 2, 4.0), (4, 4, 8.0), (4, 100, 8.0)]
)
def test_the_learning_rate_increases_linearly_during_the_warm_up(warmup_steps: int, step: int, expected: float) -> None:
    config = PolicyConfig(Path("model"), Path("run"), "cpu", "float32", 8.0, memory_plan(), warmup_steps=warmup_steps)
    assert config.learning_rate_at(step) == expected


def test_the_controller_can_describe_a_policy_without_torch() -> None:
    modules = ["policy.config", "policy.result", "algorithm.advantage", "telemetry.memory"]
    imports = "; ".join(f"import rljob_trainer.{module}" for module in modules)
    check = f"{imports}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
