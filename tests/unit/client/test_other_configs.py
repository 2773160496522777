"""Configurations of TRL and verl as the spec of an RLJob."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_client.errors import BadInput
from rljob_client.other_configs import Source, spec_from
from rljob_client.plan_command import PlanOptions, run_plan
from rljob_testing.repository import ROOT

TRL = """
model_name_or_path: Qwen/Qwen3-8B
per_device_train_batch_size: 4
gradient_accumulation_steps: 16
num_generations: 8
max_completion_length: 2048
beta: 0.04
use_peft: true
lora_r: 32
vllm_tensor_parallel_size: 2
"""
TRL_SCRIPT = """accelerate launch grpo.py --model_name_or_path Qwen/Qwen3-8B \\
  --num_generations=8 --generation_batch_size 512 --max_completion_length 1024
"""
VERL = """
data: {train_batch_size: 128, max_prompt_length: 1024, max_response_length: 4096}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-32B}
  rollout: {n: 16, tensor_model_parallel_size: 4}
  actor: {kl_loss_coef: 0.001}
trainer: {n_gpus_per_node: 8, nnodes: 2}
"""
VERL_SCRIPT = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_batch_size=64 data.max_response_length=512 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.n=5 \\
    +trainer.n_gpus_per_node=4 $@
"""


@pytest.mark.parametrize(
    ("source", "text", "gpus", "expected"),
    [
        ("trl", TRL, 2, ("hf://Qwen/Qwen3-8B", 16, 8, 512, 2048, 1, 2, 2)),
        ("trl", TRL_SCRIPT, None, ("hf://Qwen/Qwen3-8B", 64, 8, 512, 1024, 1, 1, 1)),
        ("verl", VERL, None, ("hf://Qwen/Qwen3-32B", 128, 16, 1024, 4096, 2, 8, 4)),
        ("verl", VERL, 4, ("hf://Qwen/Qwen3-32B", 128, 16, 1024, 4096, 1, 4, 4)),
        ("verl", VERL_SCRIPT, None, ("hf://Qwen/Qwen3-8B", 64, 5, 512, 512, 1, 4, 1)),
    ],
)
def test_model_lengths_batch_and_gpus_are_those_of_the_configuration(
    tmp_path: Path, source: Source, text: str, gpus: int | None, expected: tuple[Any, ...]
) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    spec = spec_from(source, file, gpus)
    algorithm, policy = spec.algorithm, spec.policy
    assert expected == (
        spec.model.uri,
        algorithm.prompts_per_step,
        algorithm.group_size,
        algorithm.max_prompt_tokens,
        algorithm.max_response_tokens,
        policy.replicas,
        policy.gpus_per_replica,
        spec.rollout.tensor_parallel_size,
    )
    assert (policy.lora is None) == (text is not TRL)
    assert (algorithm.kl_coefficient > 0) == (text in (TRL, VERL))


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        ("trl", "num_generations: 8", "expected model_name_or_path in "),
        ("verl", "actor_rollout_ref: {model: {path: a/b-8B}}", "expected actor_rollout_ref.rollout.n in "),
        ("verl", "actor_rollout_ref: {model: {path: a/b-8B}, rollout: {n: 1}}", "greater than or equal to 2"),
        ("trl", "{model_name_or_path: a/b-8B, max_completion_length: long}", "invalid literal for int"),
        ("trl", "\x00\x01", "expected model_name_or_path in "),
    ],
)
def test_missing_and_wrong_options_are_one_sentence(tmp_path: Path, source: Source, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match=message) as error:
        spec_from(source, file, None)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(tmp_path / "absent.yaml", PlanOptions(source="trl")) == 2
    assert "cannot read" in capsys.readouterr().err


def test_the_plan_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(VERL)
    assert run_plan(file, PlanOptions("h200", host="4Ti", source="verl", as_json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["parameters"] == 32_762_123_264
    assert found["verdict"].startswith("fits")


def trl_options(dtype: str, responses: int, tokens: int, *, checkpointing: bool) -> str:
    """Options of the recorded runs: 128 responses a step, vLLM in the same process, which sleeps in updates."""
    options: dict[str, Any] = {
        "model_name_or_path": "Qwen/Qwen3-8B" if tokens == 1024 else "Qwen/Qwen3-0.6B",
        "dtype": dtype,
        "per_device_train_batch_size": responses,
        "gradient_accumulation_steps": 128 // responses,
        "max_prompt_length": 16,
        "max_completion_length": tokens,
        "gradient_checkpointing": checkpointing,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
    }
    return "\n".join(f"{name}: {value}" for name, value in options.items())


@pytest.mark.parametrize(
    ("gpu", "text", "result", "arm"),
    [
        ("h100", trl_options("float32", 16, 512, checkpointing=False), "h100/large_models", "0.6b-trl"),
        ("h200", trl_options("bfloat16", 8, 1024, checkpointing=True), "large_models", "8b-trl"),
    ],
)
def test_the_peak_of_trl_itself_is_predicted_within_2_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, text: str, result: str, arm: str
) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(text)
    assert run_plan(file, PlanOptions(gpu, source="trl", as_json=True)) == 0
    peaks = json.loads(capsys.readouterr().out)["peakBytes"]["gpu"]["policy"]
    rows = json.loads((ROOT / "bench" / "results" / f"{result}.json").read_text())["rows"]
    [measured] = [row["device_peak_bytes"] for row in rows if row["arm"] == arm]
    assert max(peaks.values()) == pytest.approx(measured, rel=0.02)


def test_what_ran_out_of_memory_with_trl_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(trl_options("float32", 8, 1024, checkpointing=True))
    assert run_plan(file, PlanOptions("h200", source="trl", as_json=True)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["lack"]["phase"] == "update"
    plan = found["plan"]
    assert (plan["microBatchTokens"], plan["activationCheckpointing"], plan["rolloutSleep"]) == (8320, True, "Level2")
    assert [plan[name] for name in ("optimizerOffload", "policyOffload")] == [False, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vllm_gpu_memory_utilization: 30", "expected a number up to 1 as vllm_gpu_memory_utilization, found 30"),
        ("vllm_gpu_memory_utilization: most", "found 'most'"),
    ],
)
def test_a_wrong_share_of_the_gpu_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(f"{trl_options('bfloat16', 8, 512, checkpointing=True)}\n{line}\n")
    assert run_plan(file, PlanOptions("h100", source="trl")) == 2
    assert message in capsys.readouterr().err
