"""The failure that an exception reports."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_memory.evidence import Failure, FailureKind, failure_of_exception
from rljob_memory.evidence.activity import Activity
from rljob_memory.sizes import GIB

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has 79.00 GiB memory in use. Of the allocated memory 76.00 GiB "
    "is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)


def raised(error: Exception, file: str = "train.py", function: str = "main") -> Exception:
    """`error`, raised in `function` of `file`."""
    namespace: dict[str, Any] = {}
    exec(compile(f"def {function}(error):\n    raise error", file, "exec"), namespace)
    try:
        namespace[function](error)
    except Exception as caught:
        return caught
    raise AssertionError


def found(error: Exception) -> Failure:
    failure = failure_of_exception(error)
    assert failure is not None
    return failure


def test_message_and_stack_of_torch_give_numbers_and_activity() -> None:
    failure = found(raised(RuntimeError(FULL), "torch/optim/adamw.py", "_init_group"))
    assert failure.kind is FailureKind.ALLOCATOR
    assert failure.device is not None
    assert (failure.device.requested_bytes, failure.device.allocated_bytes) == (2 * GIB, 76 * GIB)
    assert failure.activity is Activity.OPTIMIZER


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), FailureKind.HOST),
        (OSError(28, "No space left on device", "/dev/shm/psm_1"), FailureKind.SHARED_MEMORY),
        (RuntimeError("CUDA error: out of memory\nasynchronously reported"), FailureKind.DRIVER),
        (RuntimeError("NCCL error\nFailed to CUDA calloc async 4096 bytes"), FailureKind.NCCL),
    ],
)
def test_other_messages_give_their_kind(error: Exception, kind: FailureKind) -> None:
    assert found(raised(error)).kind is kind


def test_cause_of_an_exception_comes_first() -> None:
    error = ValueError("No available memory for the cache blocks")
    error.__cause__ = raised(RuntimeError(FULL), "vllm/worker.py", "load_model")
    failure = found(raised(error))
    assert (failure.kind, failure.activity) == (FailureKind.ALLOCATOR, Activity.MODEL_LOAD)


def test_a_cycle_of_exceptions_is_visited_once() -> None:
    first, second = RuntimeError(FULL), RuntimeError("retried")
    first.__context__, second.__context__ = second, first
    assert found(first).kind is FailureKind.ALLOCATOR


def test_other_exceptions_give_no_failure() -> None:
    assert failure_of_exception(raised(ValueError("shapes do not match"))) is None
