"""The demo: a tiny model learns to repeat a digit, and everything that a run leaves behind is there and true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_api.exit_codes import ExitCode
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_testing.repository import ROOT
from rljob_testing.runs import COLD, RLJOB, FinishedRun, rljob_run
from rljob_trainer.rollout.config import engine_environment

_GENERATE = """
import gc, json, sys
gc.disable()
from vllm import LLM, SamplingParams
engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=16, kv_cache_memory_bytes=64 << 20)
prompts = [f"{digit}:" for digit in range(10)]
outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(json.dumps([output.outputs[0].text for output in outputs]))
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    run = rljob_run(ROOT / "examples" / "digits.yaml", tmp_path_factory.mktemp("digits") / "run", **COLD)
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    return run


def test_it_learns_from_an_engine_with_the_policys_weights(digits: FinishedRun) -> None:
    rewards = [step["reward"]["mean"] for step in digits.steps]
    assert np.mean(rewards[:3]) < 0.1
    assert np.mean(rewards[-5:]) >= 0.95
    assert max(step["metrics"]["logprob_diff_max"] for step in digits.steps) <= 1e-4
    assert [step["weights_version"] for step in digits.steps] == list(range(1, 61))


def test_the_summary_describes_the_run(digits: FinishedRun) -> None:
    summary = digits.summary
    assert (summary["status"], summary["steps"], summary["exit_code"]) == ("Complete", 60, 0)
    assert summary["last_reward"] == pytest.approx(np.mean([step["reward"]["mean"] for step in digits.steps[-5:]]))
    assert summary["tokens"] == 60 * 64 * (2 + 4)
    assert set(summary["seconds_by_phase"]) == {"rollout", "reward", "update", "sync", "checkpoint"}
    assert set(summary["peak_memory"]) == {"policy", "rollout"}
    assert all(0.05 < peak["gib"] < 4 for peak in summary["peak_memory"].values())


def test_output_and_directories_are_bounded(digits: FinishedRun) -> None:
    lines = digits.printed.splitlines()
    assert str(digits.output / "logs") in digits.printed
    assert sum(line.startswith("step ") for line in lines) == 60
    assert sum(line.startswith("sample of step ") for line in lines) == 2 * len([1, *range(10, 61, 10)])
    assert len(lines) < 140, "messages of the libraries are on the screen"
    assert (digits.output / "logs" / "rollout-0.log").stat().st_size > 0
    checkpoints = sorted(path.name for path in (digits.output / "checkpoints").glob("step-*"))
    assert checkpoints == ["step-000040", "step-000060"]
    assert len(list((digits.output / "journal").iterdir())) == 20


def test_transformers_loads_the_trained_model(digits: FinishedRun) -> None:
    model = AutoModelForCausalLM.from_pretrained(digits.output / "model")
    tokenizer = AutoTokenizer.from_pretrained(digits.output / "model")
    prompt = tokenizer("7:", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "7777"


def test_vllm_loads_the_trained_model(digits: FinishedRun) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, digits.output / "model"],
        env={**os.environ, **engine_environment("cpu"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [str(digit) * 4 for digit in range(10)]


def test_it_is_reported(digits: FinishedRun) -> None:
    subprocess.run([RLJOB, "report", digits.output], check=True, timeout=PATIENCE_SECONDS)
    report = (digits.output / "report.html").read_text()
    for title in ("Reward", "Entropy", "Seconds by phase", "Memory over time", "Peak memory by phase: policy"):
        assert f"<b>{title}</b>" in report


def test_adapters_reach_the_engine_and_are_exported_alone(tmp_path: Path) -> None:
    job = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    job["spec"]["algorithm"] |= {"steps": 3, "learningRate": 1.0e-2}
    job["spec"]["policy"] = {"lora": {"rank": 4, "export": "Adapter"}}
    job["spec"]["memory"] = {"policyOffload": "Enabled"}
    (tmp_path / "lora.yaml").write_text(yaml.safe_dump(job))
    run = rljob_run(tmp_path / "lora.yaml", tmp_path / "run")
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert max(step["metrics"]["logprob_diff_max"] for step in run.steps) <= 1e-4
    assert run.steps[-1]["metrics"]["grad_norm"] > 0
    assert {path.name for path in (run.output / "model").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }

    job["spec"]["policy"]["lora"]["rank"] = 8
    (tmp_path / "lora.yaml").write_text(yaml.safe_dump(job))
    refused = rljob_run(tmp_path / "lora.yaml", run.output)
    assert refused.exit_code == ExitCode.OUTPUT_UNAVAILABLE
    assert "policy.lora.rank: 4 in the run, 8 in the manifest" in refused.printed
