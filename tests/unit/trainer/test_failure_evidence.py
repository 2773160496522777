"""What is gathered around a failure, and the lines that people see of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_api.plan_change import Phase
from rljob_api.step_report import Evidence
from rljob_trainer.errors import DeviceOutOfMemory, TrainerError, WorkerLost
from rljob_trainer.recovery.failure_evidence import gather_evidence, latest_memory
from rljob_trainer.roles.actor import known_failure
from tests.unit.trainer.simulated_roles import OUT_OF_MEMORY

GIB = 1 << 30
TRACE = f"""Traceback (most recent call last):
  File "rljob_trainer/policy/update.py", line 118, in _optimizer_step
    self.optimizer.step()
  File "torch/optim/adamw.py", line 220, in step
    self._init_group(group, params_with_grad)
torch.OutOfMemoryError: {OUT_OF_MEMORY}
"""


def gathered(failure: TrainerError, directory: Path, phase: Phase | None = "update") -> Evidence | None:
    return gather_evidence(failure, directory, attempt=2, step=7, phase=phase, plan=None)


def write_memory_log(directory: Path, **last: Any) -> None:
    (directory / "memory").mkdir()
    on_device = {"allocated": GIB, "reserved": 2 * GIB, "peak_reserved": 3 * GIB, "device_total": 80 * GIB, "rss": GIB}
    lines = [{"step": 6, "phase": "sync", "micro_batch": None, **on_device}, {**on_device, **last}]
    text = "".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines)
    (directory / "memory" / "policy-0.jsonl").write_text(text + '{"torn": ')


def test_the_traceback_tells_what_was_going_on(tmp_path: Path) -> None:
    failure = DeviceOutOfMemory(OUT_OF_MEMORY).of("policy-0")
    failure.trace = TRACE
    evidence = gathered(failure, tmp_path)
    assert evidence is not None
    assert evidence.diagnoses[0].class_name == "OptimizerState"
    assert evidence.message == OUT_OF_MEMORY
    assert (evidence.attempt, evidence.role, evidence.rank, evidence.step) == (2, "policy", 0, 7)


def test_the_processs_memory_log_tells_the_micro_batch_and_the_message_the_numbers(tmp_path: Path) -> None:
    write_memory_log(tmp_path, step=7, phase="update", micro_batch=3)
    evidence = gathered(DeviceOutOfMemory(OUT_OF_MEMORY).of("policy-0"), tmp_path)
    assert evidence is not None
    assert evidence.micro_batch == 4
    assert evidence.memory is not None
    assert (evidence.memory.allocated_bytes, evidence.memory.reserved_bytes) == (76 * GIB, 77 * GIB)


def test_of_an_engine_that_never_came_up_the_message_has_all_numbers(tmp_path: Path) -> None:
    evidence = gathered(DeviceOutOfMemory(OUT_OF_MEMORY).of("rollout-0"), tmp_path, phase=None)
    assert evidence is not None
    assert evidence.memory is not None
    assert (evidence.memory.role, evidence.memory.device_free_bytes) == ("rollout", GIB)


def test_a_failure_before_the_first_micro_batch_has_none(tmp_path: Path) -> None:
    write_memory_log(tmp_path, step=6, phase="update", micro_batch=3)
    evidence = gathered(DeviceOutOfMemory(OUT_OF_MEMORY).of("policy-0"), tmp_path)
    assert evidence is not None
    assert evidence.micro_batch is None


def test_what_is_no_failure_of_memory_has_no_evidence(tmp_path: Path) -> None:
    assert gathered(WorkerLost("policy-0 died").of("policy-0"), tmp_path) is None


def test_a_process_that_never_logged_has_no_memory(tmp_path: Path) -> None:
    assert latest_memory(tmp_path, "policy", 0) is None


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RuntimeError("CUDA error: out of memory"), "DeviceOutOfMemory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "DeviceOutOfMemory"),
        (OSError(28, "No space left on device", "/dev/shm/psm_1"), "SharedMemoryExhausted"),
        (OSError(28, "No space left on device", "/data/run/memory"), "OutputUnavailable"),
        (MemoryError(), "HostOutOfMemory"),
        (
            ValueError(
                "Available memory on node 0 (0.0/1.17 GiB) on kv cache allocation is less than requested memory for kv "
                "(0.06 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used"
            ),
            "HostOutOfMemory",
        ),
        (ValueError("Killed"), "NoneType"),
        (ValueError("shapes do not match"), "NoneType"),
    ],
)
def test_errors_of_a_process_are_told_by_the_memory_that_ran_out(error: Exception, failure: str) -> None:
    assert type(known_failure(error)).__name__ == failure
