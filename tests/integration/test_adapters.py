"""Adapters in the real programs: the options change, the batches of TRL and verl do not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_testing.repository import ROOT

SITE = ROOT / "images" / "probe" / "rljob_probe" / "site"

CONFIG = """
import json, sys
from {module} import {name}
config = {name}(output_dir="out", use_cpu=True, bf16=False, report_to=[], **json.loads(sys.argv[1]))
print(json.dumps({{name: getattr(config, name, None) for name in json.loads(sys.argv[2])}}))
"""
BATCH = ["per_device_train_batch_size", "gradient_accumulation_steps"]
GRPO_BATCH = [*BATCH, "steps_per_generation", "generation_batch_size"]


def adapted(adapter: str, code: str, *arguments: str, changes: dict[str, Any]) -> tuple[str, str]:
    """Output and errors of a program with the adapter."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "RLJOB_ADAPTER": adapter,
        "RLJOB_ADAPTER_CHANGES": json.dumps(changes),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def options(module: str, name: str, given: dict[str, Any], wanted: list[str], **changes: Any) -> dict[str, Any]:
    code = CONFIG.format(module=module, name=name)
    output, _ = adapted("TRL", code, json.dumps(given), json.dumps(wanted), changes=changes)
    found: dict[str, Any] = json.loads(output)
    return found


def test_transformers_accumulates_smaller_micro_batches() -> None:
    given = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 3}
    found = options("transformers", "TrainingArguments", given, BATCH, microBatchTokens=0.5)
    assert found == {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 6}


def test_without_changes_every_option_stays() -> None:
    output, errors = adapted(
        "TRL", CONFIG.format(module="transformers", name="TrainingArguments"), "{}", json.dumps(BATCH), changes={}
    )
    assert json.loads(output) == {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    assert "rljob" not in errors


def test_the_log_names_every_change() -> None:
    code = CONFIG.format(module="transformers", name="TrainingArguments")
    changes = {"microBatchTokens": 0.25, "activationCheckpointing": True, "optimizerOffload": True}
    _, errors = adapted("TRL", code, "{}", "[]", changes=changes)
    assert "per_device_train_batch_size 8 -> 2; gradient_accumulation_steps 1 -> 4" in errors
    assert "gradient_checkpointing False -> True" in errors
    assert "optimizerOffload is not possible" in errors


def installed(package: str) -> bool:
    """A folder of that name on the path is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


trl = pytest.mark.skipif(not installed("trl"), reason="TRL is not installed (requirements/trl.txt)")


@trl
@pytest.mark.parametrize(
    ("given", "generation_batch"),
    [
        pytest.param({}, 8, id="defaults"),
        pytest.param({"gradient_accumulation_steps": 4}, 32, id="accumulation"),
        pytest.param({"steps_per_generation": 6}, 48, id="steps per generation"),
        pytest.param({"generation_batch_size": 16}, 16, id="generation batch"),
    ],
)
def test_grpo_keeps_the_batch_of_a_step_and_of_a_generation(given: dict[str, Any], generation_batch: int) -> None:
    plain = options("trl", "GRPOConfig", given, GRPO_BATCH)
    found = options("trl", "GRPOConfig", given, GRPO_BATCH, microBatchTokens=0.25)
    assert found["per_device_train_batch_size"] == 2
    assert found["generation_batch_size"] == plain["generation_batch_size"] == generation_batch
    assert _product(found) == _product(plain)
    steps_before, steps_after = (config["steps_per_generation"] for config in (plain, found))
    assert steps_after == 4 * steps_before


@trl
def test_grpo_gets_a_smaller_engine_that_sleeps() -> None:
    given = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
    wanted = ["vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"]
    found = options("trl", "GRPOConfig", given, wanted, kvCache=0.75, rolloutSleep="Level1")
    assert found == {"vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": True}


def _product(config: dict[str, Any]) -> int:
    return int(config["per_device_train_batch_size"] * config["gradient_accumulation_steps"])


# --- verl: its own configuration files, composed by hydra ---

VERL = importlib.util.find_spec("verl")
verl = pytest.mark.skipif(
    VERL is None or importlib.util.find_spec("hydra") is None, reason="verl and hydra-core are not installed"
)
MAIN = """
import json, sys
import hydra
from omegaconf import OmegaConf

@hydra.main(config_path={path!r}, config_name="ppo_trainer", version_base=None)
def main(config):
    print(json.dumps({{name: OmegaConf.select(config, name) for name in {wanted!r}}}))

main()
"""
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
LOGPROB = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
LOGPROB_TOKENS = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
OFFLOAD = "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
SLEEP = "actor_rollout_ref.rollout.free_cache_engine"
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"


def composed(tmp_path: Path, *overrides: str, changes: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    assert VERL is not None
    assert VERL.submodule_search_locations is not None
    path = f"{VERL.submodule_search_locations[0]}/trainer/config"
    folder = ["hydra.run.dir=" + str(tmp_path), "hydra.output_subdir=null"]
    output, _ = adapted("Verl", MAIN.format(path=path, wanted=wanted), *folder, *overrides, changes=changes)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@verl
def test_verl_gets_smaller_micro_batches_of_the_same_mini_batch(tmp_path: Path) -> None:
    overrides = [f"{MICRO}=8", f"{LOGPROB}=6"]
    found = composed(tmp_path, *overrides, changes={"microBatchTokens": 0.5}, wanted=[MICRO, LOGPROB, MINI, TOKENS])
    assert found == {MICRO: 4, LOGPROB: 3, MINI: 256, TOKENS: 16384}


@verl
def test_verl_gets_a_smaller_token_budget_for_the_longest_sequence(tmp_path: Path) -> None:
    overrides = ["actor_rollout_ref.actor.use_dynamic_bsz=true", "data.max_response_length=7680"]
    wanted = [TOKENS, LOGPROB_TOKENS, MICRO]
    found = composed(tmp_path, *overrides, changes={"microBatchTokens": 0.25}, wanted=wanted)
    assert found == {TOKENS: 8192, LOGPROB_TOKENS: 8192, MICRO: None}


@verl
def test_verl_gets_the_other_settings_of_the_plan(tmp_path: Path) -> None:
    changes = {
        "kvCache": 0.75,
        "optimizerOffload": True,
        "activationCheckpointing": True,
        "rolloutSleep": "Level1",
        "syncBucketSize": 0.25,
    }
    overrides = [f"{CHECKPOINTING}=false", f"{SLEEP}=false"]
    found = composed(tmp_path, *overrides, changes=changes, wanted=[SHARE, OFFLOAD, CHECKPOINTING, SLEEP, BUCKET])
    assert found == {SHARE: 0.375, OFFLOAD: True, CHECKPOINTING: True, SLEEP: True, BUCKET: 512}


@verl
@pytest.mark.parametrize("engine", ["veomni", "torchtitan", "megatron"])
def test_verl_offloads_the_optimizer_of_the_engine_in_use(tmp_path: Path, engine: str) -> None:
    option = f"actor_rollout_ref.actor.{engine}.optimizer_offload"
    found = composed(tmp_path, f"model_engine={engine}", changes={"optimizerOffload": True}, wanted=[option])
    assert found == {option: True}


@verl
def test_gpus_of_verl_that_share_a_sequence_have_smaller_budgets(tmp_path: Path) -> None:
    overrides = [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
        "data.max_prompt_length=1024",
        "data.max_response_length=31744",
    ]
    found = composed(tmp_path, *overrides, changes={"microBatchTokens": 0.5}, wanted=[TOKENS, LOGPROB_TOKENS])
    assert found == {TOKENS: 8192, LOGPROB_TOKENS: 8192}


@verl
def test_another_hydra_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("size: 8\n")
    code = MAIN.format(path=str(tmp_path), wanted=["size"]).replace("ppo_trainer", "mine")
    folder = f"hydra.run.dir={tmp_path}"
    output, errors = adapted("Verl", code, folder, "hydra.output_subdir=null", changes={"microBatchTokens": 0.5})
    assert json.loads(output) == {"size": 8}
    assert "rljob" not in errors
