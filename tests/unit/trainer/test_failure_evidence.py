"""Evidence of a failure, and the lines about it for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_api.plan_change import Phase
from rljob_api.step_report import Evidence
from rljob_client.errors import RunError
from rljob_memory.evidence.oom_snapshot import Layout, OomSnapshot
from rljob_trainer.errors import DeviceOutOfMemory, HostOutOfMemory, SharedMemoryExhausted, WorkerLost
from rljob_trainer.recovery.failure_evidence import gather_evidence, gpu_memory_at_failure, latest_memory
from rljob_trainer.roles.actor import known_failure
from rljob_trainer.roles.faults import INJECTED
from tests.unit.trainer.simulated_roles import OUT_OF_MEMORY, OutOfMemoryError, out_of_memory

GIB = 1 << 30


def raised_in(file: str, function: str) -> RunError:
    """Failure of a process, with an exception from a function of a library."""
    namespace: dict[str, Any] = {}
    exec(compile(f"def {function}(error):\n    raise error", file, "exec"), namespace)
    try:
        namespace[function](OutOfMemoryError(OUT_OF_MEMORY))
    except OutOfMemoryError as error:
        known = known_failure(error)
        assert known is not None
        return known.of("policy-0")
    raise AssertionError


def gathered(failure: RunError, directory: Path, phase: Phase | None = "update") -> Evidence | None:
    return gather_evidence(failure, directory, attempt=2, step=7, phase=phase, plan=None)


def write_memory_log(directory: Path, **last: Any) -> None:
    (directory / "memory").mkdir()
    on_device = {"allocated": GIB, "reserved": 2 * GIB, "peak_reserved": 3 * GIB, "device_total": 80 * GIB, "rss": GIB}
    lines = [{"step": 6, "phase": "sync", "micro_batch": None, **on_device}, {**on_device, **last}]
    text = "".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines)
    (directory / "memory" / "policy-0.jsonl").write_text(text + '{"torn": ')


def test_stack_of_the_exception_shows_the_activity(tmp_path: Path) -> None:
    evidence = gathered(raised_in("torch/optim/adamw.py", "_init_group"), tmp_path)
    assert evidence is not None
    assert evidence.diagnoses[0].class_name == "OptimizerState"
    assert evidence.message == OUT_OF_MEMORY
    assert (evidence.attempt, evidence.role, evidence.rank, evidence.step) == (2, "policy", 0, 7)


def test_the_memory_log_has_the_micro_batch_and_the_message_the_numbers(tmp_path: Path) -> None:
    write_memory_log(tmp_path, step=7, phase="update", micro_batch=3)
    evidence = gathered(out_of_memory("policy-0"), tmp_path)
    assert evidence is not None
    assert evidence.micro_batch == 4
    assert evidence.memory is not None
    assert (evidence.memory.allocated_bytes, evidence.memory.reserved_bytes) == (76 * GIB, 77 * GIB)


def test_of_an_engine_that_never_came_up_the_message_has_all_numbers(tmp_path: Path) -> None:
    evidence = gathered(out_of_memory("rollout-0"), tmp_path, phase=None)
    assert evidence is not None
    assert evidence.memory is not None
    assert (evidence.memory.role, evidence.memory.device_free_bytes) == ("rollout", GIB)


def test_a_failure_before_the_first_micro_batch_has_none(tmp_path: Path) -> None:
    write_memory_log(tmp_path, step=6, phase="update", micro_batch=3)
    evidence = gathered(out_of_memory("policy-0"), tmp_path)
    assert evidence is not None
    assert evidence.micro_batch is None


def test_the_memory_of_an_injected_failure_is_not_freed_by_a_change(tmp_path: Path) -> None:
    evidence = gathered(out_of_memory("policy-0"), tmp_path)
    assert evidence is not None
    assert gpu_memory_at_failure(evidence) == evidence.memory
    injected = evidence.model_copy(
        update={"message": f"{evidence.message} {INJECTED}: the fault held 142136573952 bytes"}
    )
    assert gpu_memory_at_failure(injected) is None


def test_other_failures_have_no_evidence(tmp_path: Path) -> None:
    assert gathered(WorkerLost("policy-0 died").of("policy-0"), tmp_path) is None


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (HostOutOfMemory("Ray ended policy-0, since its machine ran low on memory").of("policy-0"), "HostMemory"),
        (SharedMemoryExhausted("expected room for 512 MiB in /dev/shm of every pod"), "SharedMemory"),
        (DeviceOutOfMemory("the process left no exception").of("policy-0"), "Unknown"),
    ],
)
def test_without_an_exception_the_error_names_the_memory(error: RunError, cause: str, tmp_path: Path) -> None:
    evidence = gathered(error, tmp_path)
    assert evidence is not None
    assert evidence.diagnoses[0].class_name == cause


def test_failure_of_the_controller_is_its_own(tmp_path: Path) -> None:
    evidence = gathered(SharedMemoryExhausted("full"), tmp_path, phase=None)
    assert evidence is not None
    assert (evidence.role, evidence.rank, evidence.phase) == ("controller", 0, None)


def test_long_message_is_cut(tmp_path: Path) -> None:
    evidence = gathered(DeviceOutOfMemory("x" * 10_000), tmp_path)
    assert evidence is not None
    assert len(evidence.message) == 4096


def test_snapshot_of_the_same_failure_completes_it(tmp_path: Path) -> None:
    (tmp_path / "oom").mkdir()
    snapshot = OomSnapshot(
        time=1.0,
        role="policy",
        rank=0,
        gpu=0,
        requested_bytes=2 * GIB,
        device_free_bytes=GIB,
        device_total_bytes=80 * GIB,
        counters={"allocated_bytes": 76 * GIB, "reserved_bytes": 77 * GIB},
        layout=Layout(largest_free_block_bytes=GIB // 2),
    )
    (tmp_path / "oom" / "policy-0-step7.json").write_text(snapshot.model_dump_json())
    for actor, expected in (("policy-0", GIB // 2), ("policy-1", None)):
        evidence = gathered(out_of_memory(actor), tmp_path)
        assert evidence is not None
        assert evidence.step == 7
        assert evidence.diagnoses[0].numbers.get("largest_cached_block_bytes") == expected


def test_a_process_that_never_logged_has_no_memory(tmp_path: Path) -> None:
    assert latest_memory(tmp_path, "policy", 0) is None


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RuntimeError("CUDA error: out of memory"), "DeviceOutOfMemory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "DeviceOutOfMemory"),
        (
            RuntimeError(
                'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1016'
            ),
            "DeviceOutOfMemory",
        ),
        (OSError(28, "No space left on device", "/dev/shm/psm_1"), "SharedMemoryExhausted"),
        (OSError(28, "No space left on device", "/data/run/memory"), "OutputUnavailable"),
        (OSError(122, "Disk quota exceeded", "/data/run/memory"), "OutputUnavailable"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
            "OutputUnavailable",
        ),
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
def test_errors_of_a_process_are_classified_by_kind_of_memory(error: Exception, failure: str) -> None:
    assert type(known_failure(error)).__name__ == failure
