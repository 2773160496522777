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


def test_transformers_accumulates_smaller_micro_batches_and_logs_every_change() -> None:
    code = CONFIG.format(module="transformers", name="TrainingArguments")
    given = json.dumps({"per_device_train_batch_size": 12, "gradient_accumulation_steps": 3})
    changes = {"microBatchTokens": 0.5, "activationCheckpointing": True, "optimizerOffload": True}
    output, errors = adapted("TRL", code, given, json.dumps(BATCH), changes=changes)
    assert json.loads(output) == {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 6}
    assert "per_device_train_batch_size 12 -> 6; gradient_accumulation_steps 3 -> 6" in errors
    assert "gradient_checkpointing False -> True" in errors
    assert "optimizerOffload is not possible" in errors


def test_without_changes_every_option_stays() -> None:
    code = CONFIG.format(module="transformers", name="TrainingArguments")
    output, errors = adapted("TRL", code, "{}", json.dumps(BATCH), changes={})
    assert json.loads(output) == {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    assert "rljob" not in errors


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
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MICRO, LOGPROB = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
TOKENS, LOGPROB_TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
SLEEP = f"{ROLLOUT}.free_cache_engine"
IN_ANY_ENGINE = ("veomni", "torchtitan", "megatron")


@verl
@pytest.mark.parametrize(
    ("overrides", "changes", "expected"),
    [
        (
            [f"{MICRO}=8", f"{LOGPROB}=6"],
            {"microBatchTokens": 0.5},
            {MICRO: 4, LOGPROB: 3, f"{ACTOR}.ppo_mini_batch_size": 256, TOKENS: 16384},
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", "data.max_response_length=7680"],
            {"microBatchTokens": 0.25},
            {TOKENS: 8192, LOGPROB_TOKENS: 8192, MICRO: None},
        ),
        (
            [
                *(f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ulysses_sequence_parallel_size=4"),
                *("data.max_prompt_length=1024", "data.max_response_length=31744"),
            ],
            {"microBatchTokens": 0.5},
            {TOKENS: 8192, LOGPROB_TOKENS: 8192},
        ),
        (
            [f"{CHECKPOINTING}=false", f"{SLEEP}=false"],
            {"kvCache": 0.75, "activationCheckpointing": True, "rolloutSleep": "Level1", "syncBucketSize": 0.25},
            {
                f"{ROLLOUT}.gpu_memory_utilization": 0.375,
                CHECKPOINTING: True,
                SLEEP: True,
                f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 512,
            },
        ),
        ([], {"optimizerOffload": True}, {f"{ACTOR}.fsdp_config.optimizer_offload": True}),
        *(
            ([f"model_engine={name}"], {"optimizerOffload": True}, {f"{ACTOR}.{name}.optimizer_offload": True})
            for name in IN_ANY_ENGINE
        ),
    ],
)
def test_verl_gets_the_settings_of_the_plan(
    tmp_path: Path, overrides: list[str], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert VERL is not None
    assert VERL.submodule_search_locations is not None
    code = MAIN.format(path=f"{VERL.submodule_search_locations[0]}/trainer/config", wanted=list(expected))
    folder = [f"hydra.run.dir={tmp_path}", "hydra.output_subdir=null"]
    output, _ = adapted("Verl", code, *folder, *overrides, changes=changes)
    assert json.loads(output.splitlines()[-1]) == expected


@verl
def test_another_hydra_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("size: 8\n")
    code = MAIN.format(path=str(tmp_path), wanted=["size"]).replace("ppo_trainer", "mine")
    folder = f"hydra.run.dir={tmp_path}"
    output, errors = adapted("Verl", code, folder, "hydra.output_subdir=null", changes={"microBatchTokens": 0.5})
    assert json.loads(output) == {"size": 8}
    assert "rljob" not in errors
