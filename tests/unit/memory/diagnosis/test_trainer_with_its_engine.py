"""Failures of a trainer that runs vLLM in its own process on one GPU, as TRL 1.16 does, in the forms that it prints."""

from __future__ import annotations

from datetime import UTC, datetime
from io import BytesIO

import pytest

from rljob_api.plan_change import Phase
from rljob_api.step_report import Evidence
from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose, diagnosed
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader

SITE = "/env/lib/python3.12/site-packages"
TRAINER = f"""Traceback (most recent call last):
  File "/app/train.py", line 40, in <module>
    trainer.train()
  File "{SITE}/transformers/trainer.py", line 2100, in train
    return inner_training_loop(
  File "{SITE}/trl/trainer/grpo_trainer.py", line 1100, in training_step
    output = super().training_step(model, inputs, num_items_in_batch)
"""
BACKWARD = f"""  File "{SITE}/accelerate/accelerator.py", line 2734, in backward
    loss.backward(**kwargs)
"""
LOGPROBS = f"""  File "{SITE}/trl/trainer/grpo_trainer.py", line 980, in _get_per_token_logps_and_entropies
    logits = model(**model_inputs).logits
"""


def message(requested: str, free: str, allocated: str, cached: str = "0.90 GiB") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {requested}. GPU 0 has a total capacity of "
        f"139.80 GiB of which {free} is free. Including non-PyTorch memory, this process has 138.00 GiB memory in use. "
        f"Of the allocated memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting expandable_segments:True"
    )


def best(*texts: str) -> Diagnosis:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO("\n".join(texts).encode()))
    return diagnose(builder.build())[0]


@pytest.mark.parametrize("stack", [LOGPROBS, BACKWARD])
def test_an_update_that_is_too_large(stack: str) -> None:
    found = best("per_device_train_batch_size=64", TRAINER + stack + message("37.10 GiB", "1.70 GiB", "99.00 GiB"))
    assert found.failure_class is FailureClass.ACTIVATION_SPIKE
    assert found.confidence > 0.4
    assert "per_device_train_batch_size: 64 → 32" in found.advice


@pytest.mark.parametrize("phase", ["update", None])
def test_an_update_that_is_too_large_as_the_probe_reports_it(phase: Phase | None) -> None:
    reported = Evidence(
        time=datetime.now(UTC), attempt=1, role="policy", rank=0, step=1, phase=phase,
        message=message("37.10 GiB", "1.70 GiB", "99.00 GiB"),
    )  # fmt: skip
    causes = diagnosed(reported).diagnoses
    assert causes[0].class_name == "ActivationSpike"
    assert causes[0].confidence > 0.4


def test_an_engine_left_awake_with_most_of_the_gpu() -> None:
    engine = "INFO 11-21 10:02:11 [gpu_worker.py:642] Available KV cache memory: 101.20 GiB"
    found = best(engine, TRAINER + BACKWARD + message("1.16 GiB", "0.90 GiB", "135.20 GiB", "1.90 GiB"))
    assert found.failure_class is FailureClass.ENGINE_NOT_ASLEEP
    assert "vllm_enable_sleep_mode: True" in found.advice


START = (
    f'  File "{SITE}/trl/generation/vllm_generation.py", line 300, in _init_vllm\n    self.llm = LLM(\n'
    f'  File "{SITE}/vllm/v1/worker/gpu_worker.py", line 240, in init_device\n    raise ValueError(\n'
)
REFUSED = (
    "ValueError: Free memory on device cuda:0 (59.60/139.80 GiB) on startup is less than desired GPU memory "
    "utilization (0.85, 118.83 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
TOO_SMALL = (
    "ValueError: To serve at least one request with the models's max seq len (32768), (4.50 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.12 GiB). Based on the available memory, the estimated "
    "maximum model length is 8176. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`."
)


def test_an_engine_that_does_not_start_beside_the_policy() -> None:
    found = best("vllm_gpu_memory_utilization=0.85", TRAINER + START + REFUSED)
    assert found.failure_class is FailureClass.KV_CACHE_OVERSIZED
    assert "vllm_gpu_memory_utilization: 0.85 → 0.4" in found.advice
    assert "other process" not in found.advice.lower()


def test_a_cache_too_small_for_one_request() -> None:
    found = best(TRAINER + START + TOO_SMALL)
    assert found.failure_class is FailureClass.KV_CACHE_OVERSIZED
    assert "raise vllm_gpu_memory_utilization" in found.advice
    assert "vllm_max_model_length" in found.advice


@pytest.mark.parametrize("stack", [LOGPROBS, BACKWARD])
def test_the_second_step_beside_the_state_that_the_first_created(stack: str) -> None:
    first = "{'loss': '0.0', 'grad_norm': '0.31', 'learning_rate': '1e-06', 'epoch': '0.01'}"
    found = best(first, TRAINER + stack + message("1.16 GiB", "0.90 GiB", "136.10 GiB", "1.50 GiB"))
    assert found.failure_class is FailureClass.OPTIMIZER_STATE
    assert "TRL: set optim: paged_adamw_8bit" in found.advice
    assert "dtype: bfloat16" in found.advice


@pytest.mark.parametrize(
    "progress",
    [
        "{'loss': 0.1, 'epoch': 0.2}\n 20%|██        | 10/50 [02:00<08:00, 12.1s/it]",
        "(TaskRunner pid=7) step:0 - val/score:0.1",
        "Loading checkpoint shards: 100%|██████████| 1/1 [00:01<00:00]",
    ],
    ids=["ten steps between two metrics", "a validation before the first step", "another bar"],
)
def test_other_progress_is_not_one_step(progress: str) -> None:
    found = best(progress, TRAINER + BACKWARD + message("1.16 GiB", "0.90 GiB", "136.10 GiB", "1.50 GiB"))
    assert found.failure_class is FailureClass.ACTIVATION_SPIKE


@pytest.mark.parametrize("progress", ["  2%|▏         | 1/50 [00:12<08:00, 12.1s/it]", "step:1 - actor/loss:0.1"])
def test_one_step_is_read_from_bars_and_metrics(progress: str) -> None:
    found = best(progress, TRAINER + BACKWARD + message("1.16 GiB", "0.90 GiB", "136.10 GiB", "1.50 GiB"))
    assert found.failure_class is FailureClass.OPTIMIZER_STATE


def test_a_later_step_is_no_question_of_the_optimizers_state() -> None:
    metrics = ["{'loss': '0.0', 'grad_norm': '0.31', 'epoch': '0.01'}"] * 9
    found = best(*metrics, TRAINER + BACKWARD + message("1.16 GiB", "0.90 GiB", "136.10 GiB", "1.50 GiB"))
    assert found.failure_class is FailureClass.ACTIVATION_SPIKE
