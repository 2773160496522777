"""Configurations of TRL and verl as the spec of an RLJob."""

from __future__ import annotations

import json
import re
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


BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{{', '.join(f'k{key}: *a{n - 1}' for key in range(9))}}}\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        ("trl", "num_generations: 8", "expected model_name_or_path in "),
        ("trl", "\x00\x01", "expected model_name_or_path in "),
        *(
            ("trl", text, "expected model_name_or_path in ")
            for text in ("", "- 1\n", "42", "a: [1\nb: }", "[" * 9_000, "1: 2")
        ),
        ("trl", BOMB, "found more than 100000 fields"),
        ("verl", "a: &a {b: *a}", "found an alias that contains itself"),
        ("trl", "a: 1\n" * (1 << 16), "expected at most 256 KiB of options"),
        ("trl", TRL.replace("num_generations", "num_genrations"), "correct the name of num_genrations"),
        *(
            (
                "trl",
                TRL.replace("num_generations: 8", f"num_generations: {value}"),
                f"expected a {what} as num_generations",
            )
            for what, values in {
                "number from 2": (1, 0, -8),
                "whole number": (8.5, ".nan", "true", "[8]", "long", "$N", "'" + "9" * 5_000 + "'"),
            }.items()
            for value in values
        ),
        *(
            ("trl", TRL.replace("length: 2048", f"length: {value}"), "expected a whole number as max_completion_length")
            for value in (".inf", 10**20, "long")
        ),
        (
            "trl",
            TRL.replace("num_generations: 8", "num_generations: 7"),
            "that num_generations divides, found 64 on 1 GPUs",
        ),
        ("trl", f"{TRL}generation_batch_size: 18", "that 4 responses on each of 1 GPUs divide, found 18"),
        (
            "trl",
            f"{TRL}generation_batch_size: 16\nsteps_per_generation: 4",
            "generation_batch_size or steps_per_generation",
        ),
        ("trl", TRL.replace("beta: 0.04", "beta: much"), "expected a number as beta"),
        ("trl", TRL.replace("beta: 0.04", "beta: -1"), "greater than or equal to 0"),
        ("trl", TRL.replace("beta: 0.04", "beta: .nan"), "finite number"),
        ("trl", TRL.replace("lora_r: 32", "lora_r: -4"), "expected a number from 0 as lora_r"),
        *(
            ("trl", TRL.replace("Qwen/Qwen3-8B", value), "expected the name of a model, or an absolute path")
            for value in ("7", "[a, b]", "''", "./model", "~/model", "${MODEL}")
        ),
        (
            "trl",
            TRL.replace("size: 2", "size: 3"),
            "expected a divisor of the GPUs of a machine, 1, as vllm_tensor_parallel_size",
        ),
        ("verl", "actor_rollout_ref: {model: {path: a/b-8B}}", "expected actor_rollout_ref.rollout.n in "),
        ("verl", "data: {train_batch_size: 8}", "expected actor_rollout_ref.model.path in "),
        ("verl", "actor_rollout_ref: {model: {path: a/b-8B}, rollout: 5}", "expected actor_rollout_ref.rollout.n in "),
        ("verl", VERL.replace("{n: 16,", "{n: 1,"), "expected a number from 2 as actor_rollout_ref.rollout.n"),
        ("verl", VERL.replace("{n: 16,", '{n: "${N}",'), "expected a whole number as actor_rollout_ref.rollout.n"),
        ("verl", VERL.replace("nnodes: 2", "nnodes: '${oc.env:N,1}'"), "expected a whole number as trainer.nnodes"),
        ("verl", VERL.replace("nnodes: 2", "nnodes: -2"), "expected a number from 1 as trainer.nnodes"),
        ("verl", VERL.replace("length: 4096", "length: '${data.max_response_length}'"), "as data.max_response_length"),
        ("verl", VERL.replace("Qwen/Qwen3-32B", "'???'"), "expected the name of a model"),
        ("verl", VERL.replace("size: 128,", "size: 0,"), "expected a number from 1 as data.train_batch_size"),
        ("verl", VERL.replace("size: 128,", "size: 127,"), "as a multiple of the 16 GPUs, found 127 × 15"),
        ("verl", VERL.replace("per_node: 8", "per_node: 0"), "expected a number from 1 as trainer.n_gpus_per_node"),
        (
            "verl",
            VERL.replace("actor: {", "actor: {ppo_mini_batch_size: 256, "),
            "expected at most data.train_batch_size, 128",
        ),
    ],
)
def test_missing_and_wrong_options_are_one_sentence(tmp_path: Path, source: Source, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text.replace("{n: 16,", "{n: 15,") if "127" in text else text)
    with pytest.raises(BadInput, match=re.escape(message)) as error:
        spec_from(source, file, None)
    assert "\n" not in str(error.value)


def test_a_reference_to_another_option_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(VERL.replace("length: 4096", "length: '${data.max_prompt_length}'"))
    assert spec_from("verl", file, None).algorithm.max_response_tokens == 1024


@pytest.mark.parametrize("content", [b"\x92\x00", TRL.encode("utf-16")])
def test_a_file_without_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    assert run_plan(file, PlanOptions(source="trl")) == 2
    assert "expected UTF-8 text, found" in capsys.readouterr().err


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


def test_gpus_that_an_engine_does_not_divide_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config"
    file.write_text(VERL)
    assert run_plan(file, PlanOptions("h100", gpus=2, source="verl")) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert "expected a divisor of the GPUs of a machine, 2, as actor_rollout_ref.rollout.tensor_model_parallel" in error


@pytest.mark.parametrize("source", ["trl", "verl"])
def test_no_field_of_an_rljob_is_advised_to_users_of_another_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Source
) -> None:
    file = tmp_path / "config"
    file.write_text(TRL if source == "trl" else VERL)
    assert run_plan(file, PlanOptions("l4", gpus=2 if source == "trl" else 4, source=source)) == 1
    verdict = capsys.readouterr().out.splitlines()[2]
    assert verdict.startswith("does not fit, because")
    assert "it fits with" not in verdict


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
