"""A rollout engine without a policy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_client.errors import RunError
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout.colocated_engine import ColocatedEngine
from rljob_trainer.rollout.config import RolloutConfig


class RecordingLLM:
    """Stands for vLLM and records its calls, in order."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def sleep(self, level: int) -> None:
        self.calls.append(level)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(tags)


def engine(model_dir: Path, **settings: Any) -> tuple[ColocatedEngine, RecordingLLM]:
    defaults: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_seqs": 8,
        "kv_cache_bytes": 1 << 20,
    }
    made = ColocatedEngine(0, RolloutConfig(model_dir=model_dir, max_response_tokens=8, **(defaults | settings)))
    made._llm = llm = RecordingLLM()
    return made, llm


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("random://qwen3", tmp_path_factory.mktemp("models"))


def a_night(made: ColocatedEngine) -> None:
    made.sleep()
    made.sleep()
    made.wake_weights()
    made.wake_kv_cache()
    made.wake_kv_cache()


@pytest.mark.parametrize("settings", [{"sleep_level": 0}, {"sleep_level": 2, "device": "cpu", "dtype": "float32"}])
def test_sleep_and_wake_have_no_effect_on_the_cpu_and_at_level_0(model_dir: Path, settings: dict[str, object]) -> None:
    made, llm = engine(model_dir, **settings)
    a_night(made)
    assert llm.calls == []


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_at_its_level_and_wakes_each_part_once(model_dir: Path, level: int) -> None:
    made, llm = engine(model_dir, sleep_level=level)
    a_night(made)
    assert llm.calls == [level, ["weights"], ["kv_cache"]]


def test_an_engine_refuses_to_generate_before_its_first_weights(model_dir: Path) -> None:
    made, _ = engine(model_dir)
    with pytest.raises(RunError, match="it has never received weights"):
        made.generate([[1, 2]], 1, [0])


def test_a_rollout_process_imports_neither_policy_nor_optimizer() -> None:
    program = (
        "import rljob_trainer.roles.rollout_actor, rljob_trainer.weight_sync.broadcast_group, sys;"
        "print([name for name in sys.modules if name.startswith(('rljob_trainer.policy', 'torch.optim'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
