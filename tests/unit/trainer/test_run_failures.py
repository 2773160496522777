"""Errors of processes: their types, their evidence, and the state after them."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import ray
import torch
from ray.exceptions import ObjectLostError, RayTaskError

from rljob_api.memory_failure import Activity
from rljob_api.plan_change import Phase, Role
from rljob_api.step_report import Evidence
from rljob_client.errors import BadInput, RunError
from rljob_testing.memory_plans import memory_failure
from rljob_trainer.errors import DeviceOutOfMemory, HostOutOfMemory, SharedMemoryExhausted, WorkerLost
from rljob_trainer.recovery.failure_evidence import gather_evidence, gpu_memory_at_failure, latest_memory
from rljob_trainer.recovery.phase_deadlines import PhaseDeadlines
from rljob_trainer.recovery.recovery import KernelKills, dead_roles
from rljob_trainer.roles import actor
from rljob_trainer.roles.actor import RoleActor, is_repeatable, known_failure, refused_input
from rljob_trainer.roles.calls import result_of
from rljob_trainer.roles.faults import INJECTED
from rljob_trainer.roles.time_limit import current_limit
from rljob_trainer.runtime.attempt import _construct
from rljob_trainer.runtime.job_run import require_new_failure
from tests.unit.trainer.simulated_roles import OUT_OF_MEMORY, OutOfMemoryError, SimulatedRoles, out_of_memory

GIB, MIB = 1 << 30, 1 << 20


def raised_in(file: str, function: str) -> RunError:
    """Failure of a process, with an exception from a function of a library."""
    namespace: dict[str, Any] = {}
    exec(compile(f"def {function}(error):\n    raise error", file, "exec"), namespace)
    with pytest.raises(OutOfMemoryError) as raised:
        namespace[function](OutOfMemoryError(OUT_OF_MEMORY))
    known = known_failure(raised.value)
    assert known is not None
    return known.of("policy-0")


def gathered(failure: RunError, directory: Path, phase: Phase | None = "update", step: int = 7) -> Evidence:
    evidence = gather_evidence(failure, directory, attempt=2, step=step, phase=phase, plan=None)
    assert evidence is not None
    return evidence


def test_the_evidence_joins_exception_message_and_memory_log(tmp_path: Path) -> None:
    on_device = {"allocated": GIB, "reserved": 2 * GIB, "peak_reserved": 3 * GIB, "device_total": 80 * GIB, "rss": GIB}
    places = [{"step": 6, "phase": "sync", "micro_batch": None}, {"step": 7, "phase": "update", "micro_batch": 3}]
    (tmp_path / "memory").mkdir()
    text = "".join(json.dumps({"time": 0.0, **place, **on_device}) + "\n" for place in places)
    (tmp_path / "memory" / "policy-0.jsonl").write_text(text + '{"torn": ')
    evidence = gathered(raised_in("torch/optim/adamw.py", "_init_group"), tmp_path)
    assert evidence.diagnoses[0].class_name == "OptimizerState", "from the stack of the exception"
    assert evidence.message == OUT_OF_MEMORY
    assert (evidence.attempt, evidence.role, evidence.rank, evidence.step) == (2, "policy", 0, 7)
    assert evidence.micro_batch == 4
    assert gathered(out_of_memory("policy-0"), tmp_path, step=8).micro_batch is None, "before the first"
    assert evidence.memory is not None
    assert (evidence.memory.allocated_bytes, evidence.memory.reserved_bytes) == (76 * GIB, 77 * GIB)
    assert latest_memory(tmp_path, "policy", 1) is None, "this process never logged"
    never_up = gathered(out_of_memory("rollout-0"), tmp_path, phase=None).memory
    assert never_up is not None
    assert (never_up.role, never_up.device_free_bytes) == ("rollout", GIB), "the message has all numbers"


def test_the_memory_of_an_injected_failure_is_not_freed_by_a_change(tmp_path: Path) -> None:
    evidence = gathered(out_of_memory("policy-0"), tmp_path)
    assert gpu_memory_at_failure(evidence) == evidence.memory
    message = f"{evidence.message} {INJECTED}: the fault held 142136573952 bytes"
    assert gpu_memory_at_failure(evidence.model_copy(update={"message": message})) is None


@pytest.mark.parametrize(
    ("error", "role", "cause"),
    [
        (HostOutOfMemory("Ray ended policy-0, as memory was low").of("policy-0"), "policy", "HostMemory"),
        (SharedMemoryExhausted("expected room for 512 MiB in /dev/shm of every pod"), "controller", "SharedMemory"),
        (DeviceOutOfMemory("x" * 10_000).of("policy-0"), "policy", "Unknown"),
    ],
)
def test_without_an_exception_the_error_names_the_memory(
    error: RunError, role: str, cause: str, tmp_path: Path
) -> None:
    evidence = gathered(error, tmp_path, phase=None)
    assert (evidence.role, evidence.rank, evidence.phase) == (role, 0, None)
    assert evidence.diagnoses[0].class_name == cause
    assert len(evidence.message) <= 4096
    lost = WorkerLost("policy-0 died").of("policy-0")
    assert gather_evidence(lost, tmp_path, attempt=2, step=7, phase=None, plan=None) is None


def test_the_account_of_the_observer_outranks_the_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = memory_failure(activity=Activity.LOGITS)
    monkeypatch.setattr("rljob_trainer.telemetry.out_of_memory._latest", account)
    message = OUT_OF_MEMORY.replace("2.00 GiB", "4.00 GiB")
    failure = known_failure(OutOfMemoryError(message))
    assert failure is not None
    evidence = gathered(failure.of("policy-1"), tmp_path)
    assert evidence.failure is not None
    assert (evidence.failure.activity, evidence.failure.rank) == (Activity.LOGITS, 1)
    assert evidence.diagnoses[0].numbers["largest_cached_block_bytes"] == 600 * MIB
    again = known_failure(OutOfMemoryError(message))
    assert again is not None
    assert again.out_of_memory != account, "each account is of one failure"


# --- kinds of errors ---

NVML_ASSERTION = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1016'
NO_ROOM_FOR_KV_CACHE = (
    "Available memory on node 0 (0.0/1.17 GiB) on kv cache allocation is less than requested memory for kv (0.06 GiB). "
    "Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used"
)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RuntimeError("CUDA error: out of memory"), "DeviceOutOfMemory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "DeviceOutOfMemory"),
        (RuntimeError(NVML_ASSERTION), "DeviceOutOfMemory"),
        (OSError(28, "No space left on device", "/dev/shm/psm_1"), "SharedMemoryExhausted"),
        (OSError(28, "No space left on device", "/data/run/memory"), "OutputUnavailable"),
        (OSError(122, "Disk quota exceeded", "/data/run/memory"), "OutputUnavailable"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), "OutputUnavailable"),
        (MemoryError(), "HostOutOfMemory"),
        (ValueError(NO_ROOM_FOR_KV_CACHE), "HostOutOfMemory"),
        (ValueError("Killed"), "NoneType"),
        (ValueError("shapes do not match"), "NoneType"),
    ],
)
def test_errors_of_a_process_are_classified_by_kind_of_memory(error: Exception, failure: str) -> None:
    assert type(known_failure(error)).__name__ == failure


def test_a_role_that_was_not_constructed_fails_every_call_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the constructors of engines that replace lost ones."""

    def engine() -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(actor, "_redirect_output", lambda _log: None)
    monkeypatch.setattr(actor, "_set_title", lambda _name: None)
    monkeypatch.setattr(actor, "long_imports", nullcontext)
    monkeypatch.setattr(importlib, "import_module", lambda _name: SimpleNamespace(Engine=engine))
    made = RoleActor("rollout-1", "module:Engine", Path("log"))
    with pytest.raises(HostOutOfMemory):
        made.construct()
    with pytest.raises(HostOutOfMemory) as raised:
        made.call(None, "start")
    assert raised.value.actor == "rollout-1"


class Unpassable(Exception):
    """An exception whose type Python code does not raise by mistake."""


@pytest.mark.parametrize(
    ("error", "repeatable", "refused"),
    [
        *[(kind("wrong"), True, True) for kind in (ValueError, TypeError, KeyError, IndexError, AttributeError)],
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), True, True),
        (NotImplementedError("head size 16"), True, True),
        (RecursionError("too deep"), True, True),
        (RuntimeError("Unsupported CPU attention configuration: head_dim=16"), True, False),
        (AssertionError("wrong"), True, False),
        (AssertionError("Error in memory profiling"), False, False),  # another process has freed memory since
        (ValueError("Default process group has not been initialized"), False, False),  # a peer has left
        (ValueError("Free memory on device cuda:0 is less than desired"), False, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, False),
        (RuntimeError("NCCL error: unhandled system error"), False, False),
        (RuntimeError("[gloo] Connection closed by peer"), False, False),
        (torch.distributed.DistBackendError("NCCL"), False, False),
        (torch.distributed.DistNetworkError("timed out"), False, False),
        *[(kind("peer"), False, False) for kind in (ConnectionResetError, TimeoutError, OSError, Unpassable)],
    ],
    ids=lambda value: f"{type(value).__name__}-{value}"[:40] if isinstance(value, Exception) else "",
)
def test_only_ordinary_exceptions_count_as_repeatable(error: Exception, repeatable: bool, refused: bool) -> None:
    assert is_repeatable(error) is repeatable
    assert (refused_input(error, "start") is not None) is refused
    assert refused_input(error, "update") is None


# --- errors that a restart meets again ---


def raised(
    kind: str = "IndexError while generating",
    actor: str = "rollout-0",
    message: str = "first",
    failure: type[RunError] = RunError,
) -> RunError:
    raised = failure(f"{actor} failed while generating: {message}").of(actor)
    raised.raised = kind
    return raised


@pytest.mark.parametrize(
    ("first", "second", "step", "repeats"),
    [
        (raised(), raised(message="other words"), 4, True),
        (raised(), raised(actor="rollout-1"), 4, True),
        (raised(), raised(), 5, False),
        (raised(), raised("ValueError while generating"), 4, False),
        (raised(), raised(actor="policy-0"), 4, False),
        (WorkerLost("died"), WorkerLost("died"), 4, False),
    ],
)
def test_the_same_exception_at_the_same_step_is_not_restarted_again(
    tmp_path: Path, first: RunError, second: RunError, step: int, repeats: bool
) -> None:
    record = tmp_path / "failure.json"
    record.write_bytes(b"[1")  # a damaged record counts as none
    require_new_failure(first, record, 4)
    if not repeats:
        require_new_failure(second, record, step)
        return
    with pytest.raises(BadInput, match="generating: first; a restart failed in the same way at step 4") as refused:
        require_new_failure(second, record, step)
    assert refused.value.actor == second.actor


@pytest.mark.parametrize(
    ("failure", "kind", "message", "repeats"),
    [
        (IndexError("out of range"), RunError, "IndexError: out of range", "IndexError while generating"),
        (RuntimeError("head_dim=16"), RunError, "head_dim=16", "RuntimeError while generating: head_dim=16"),
        (RuntimeError("CUDA error"), RunError, "CUDA error", None),
        (raised("ValueError", failure=BadInput), BadInput, "^rollout-0 failed while generating: rollout", "ValueError"),
        # Ray keeps a large result in the memory of the actor's node, and reports the call as complete.
        (ObjectLostError("00", None, ""), WorkerLost, "rollout-0 died while generating", None),
    ],
)
def test_the_error_of_a_call_names_its_role_and_what_may_repeat(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, kind: type[RunError], message: str, repeats: str | None
) -> None:
    def get(_reference: object) -> NoReturn:
        raise failure if isinstance(failure, ObjectLostError) else RayTaskError("call", "traceback", failure)

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(kind, match=message) as failed:
        result_of("reference", "rollout-0", "generating")
    assert (failed.value.actor, failed.value.raised) == ("rollout-0", repeats)


# --- processes that are lost ---


def test_a_kill_by_the_kernel_explains_one_lost_process() -> None:
    """This includes a process that is lost while it starts, and a loss that is noticed later."""
    counts = [3, 3, 4, 5, 5]

    def lost() -> NoReturn:
        raise WorkerLost("rollout-0 died while starting").of("rollout-0")

    kills = KernelKills(lambda: counts.pop(0) if len(counts) > 1 else counts[0])
    roles = cast(Any, SimpleNamespace(construct=lost))
    for kind, message in ((WorkerLost, "died while starting"), (HostOutOfMemory, "OOMKilled")):
        with pytest.raises(RunError, match=message) as raised:
            _construct(roles, PhaseDeadlines(600, []), kills)
        assert (type(raised.value), raised.value.actor) == (kind, "rollout-0")
    assert kills.any_new
    assert isinstance(kills.explain(WorkerLost("policy-0 died while updating")), HostOutOfMemory)
    assert not kills.any_new
    assert type(kills.explain(WorkerLost("policy-0 died while updating"))) is WorkerLost


def test_the_first_start_of_the_processes_has_a_deadline_too() -> None:
    roles = cast(
        Any, SimpleNamespace(construct=lambda: {"seconds": limit.seconds if (limit := current_limit()) else 0})
    )
    for deadline_seconds, limit_seconds in ((600, 12 * 600), (0, 0)):
        found = _construct(roles, PhaseDeadlines(deadline_seconds, []), KernelKills(lambda: 0))
        assert found == {"seconds": limit_seconds}


@pytest.mark.parametrize(
    ("failure", "actor", "phase", "policy_at", "expected"),
    [
        (DeviceOutOfMemory, "policy-0", "update", 2, set()),
        (DeviceOutOfMemory, "policy-0", "update", None, {"policy"}),  # it was interrupted in its optimizer step
        (DeviceOutOfMemory, "policy-0", None, None, {"policy"}),
        (DeviceOutOfMemory, "policy-0", "sync", 2, set()),
        (DeviceOutOfMemory, "rollout-0", "rollout", 2, {"rollout"}),
        (DeviceOutOfMemory, "rollout-0", "sync", 2, {"rollout"}),
        (DeviceOutOfMemory, "rollout-0", "sync", None, {"policy", "rollout"}),
        (HostOutOfMemory, "policy-0", "update", 2, {"policy"}),
        (SharedMemoryExhausted, "policy-0", "sync", 2, {"policy"}),
        (HostOutOfMemory, None, "reward", 2, {"controller"}),
    ],
)
def test_a_role_is_dead_if_its_processes_or_its_weights_are_lost(
    failure: type[RunError], actor: str | None, phase: Phase | None, policy_at: int | None, expected: set[Role]
) -> None:
    roles = SimulatedRoles({})
    if phase is not None:  # else it failed while loading
        roles.load()
    roles.policy_at = policy_at
    assert dead_roles(cast(Any, roles), failure("").of(actor) if actor else failure(""), phase) == expected
