"""Snapshots of failed requests. torch calls the observer as (device, request, allowed, free)."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rljob_api.memory_failure import Activity, MemoryFailure
from rljob_memory.evidence import read_evidence
from rljob_memory.evidence.activity import activity_of
from rljob_trainer.activities import activity, current_activity
from rljob_trainer.telemetry.memory import MemoryLog
from rljob_trainer.telemetry.out_of_memory import attach_out_of_memory_observer, small_pickle, stack, take_account

GIB, MIB = 1 << 30, 1 << 20


def block(size: int, state: str) -> dict[str, Any]:
    return {"address": 1, "size": size, "requested_size": size, "state": state, "frames": []}


def segment(*blocks: dict[str, Any], expandable: bool = False) -> dict[str, Any]:
    return {
        "device": 0,
        "total_size": sum(one["size"] for one in blocks),
        "allocated_size": sum(one["size"] for one in blocks if one["state"] != "inactive"),
        "is_expandable": expandable,
        "blocks": list(blocks),
    }


SNAPSHOT = {
    "segments": [
        segment(block(300 * MIB, "active_allocated"), block(200 * MIB, "inactive")),
        segment(block(GIB, "active_allocated"), block(600 * MIB, "inactive"), block(MIB, "active_awaiting_free")),
    ],
    "device_traces": [[]],
    "allocator_settings": {},
}
STATS = {
    "allocated_bytes": {"all": {"current": 1301 * MIB, "peak": 2 * GIB}},
    "reserved_bytes": {"all": {"current": 2125 * MIB, "peak": 2 * GIB}},
    "num_ooms": 1,
}


@dataclass
class ObservedRank:
    """The observer in the process of policy rank 2, the memory log of that process, and the run's directory."""

    request: Callable[[int, int, int, int], None]
    log: MemoryLog
    run: Path

    @property
    def record(self) -> MemoryFailure:
        return MemoryFailure.model_validate_json((self.run / "oom" / "policy-2-step7.json").read_text())


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ObservedRank:
    attached: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda _device: STATS, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: SNAPSHOT)
    log = MemoryLog(tmp_path / "memory" / "policy-2.jsonl", "cpu")
    attach_out_of_memory_observer(tmp_path / "oom", "policy", 2, lambda: log.progress)
    return ObservedRank(attached[0], log, tmp_path)


def test_a_failed_request_is_recorded_with_place_and_memory(observed: ObservedRank) -> None:
    observed.log.begin_phase(7, "update")
    observed.log.record(7, "update", 3)
    observed.request(0, 700 * MIB, 80 * GIB, 30 * MIB)
    record = observed.record
    assert (record.role, record.rank, record.step, record.phase, record.micro_batch) == ("policy", 2, 7, "update", 4)
    assert record.device is not None
    assert (record.device.requested_bytes, record.device.free_bytes) == (700 * MIB, 30 * MIB)
    assert record.device.reserved_bytes == 2125 * MIB
    assert record.device.largest_cached_block_bytes == 600 * MIB
    assert take_account("CUDA out of memory. Tried to allocate 700.00 MiB.") == record
    assert take_account("CUDA out of memory. Tried to allocate 700.00 MiB.") is None
    assert pickle.loads((observed.run / "oom" / "policy-2-step7.pickle").read_bytes()) == SNAPSHOT
    failure = read_evidence(observed.run).failure
    assert failure is not None
    assert failure.device is not None
    assert failure.device.largest_cached_block_bytes == 600 * MIB
    assert (failure.role, failure.rank, failure.step) == ("policy", 2, 7)


def test_an_account_belongs_to_the_request_in_the_message(observed: ObservedRank) -> None:
    observed.request(0, 1199 * MIB, 80 * GIB, 30 * MIB)
    assert take_account("CUDA out of memory. Tried to allocate 1.17 GiB.") is not None
    for other in ("CUDA out of memory. Tried to allocate 1.20 GiB.", "out of memory", ""):
        observed.request(0, 1199 * MIB, 80 * GIB, 30 * MIB)  # caught by the program, which continued
        assert take_account(other) is None


def test_each_try_of_a_phase_is_recorded_once(observed: ObservedRank) -> None:
    observed.log.begin_phase(7, "update")
    observed.request(0, 700, 80 * GIB, 0)
    observed.log.record(7, "update", 0)
    observed.request(0, 500, 80 * GIB, 0)
    assert observed.record.requested_bytes == 700
    observed.log.begin_phase(7, "update")
    observed.request(0, 300, 80 * GIB, 0)
    assert observed.record.requested_bytes == 300


@pytest.mark.parametrize("fails", ["_snapshot", "get_device_properties", "the disk"])
def test_an_error_in_the_observer_does_not_hide_the_failure(
    observed: ObservedRank, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the allocator is in no state to be asked")

    if fails == "the disk":
        (observed.run / "oom").write_text("no directory")
    else:
        monkeypatch.setattr(torch.cuda.memory if fails == "_snapshot" else torch.cuda, fails, broken)
    observed.request(0, 700, 80 * GIB, 0)
    assert read_evidence(observed.run).failure is None


@pytest.mark.parametrize("work", [Activity.LOGITS, Activity.OPTIMIZER])
def test_the_innermost_mark_names_the_work(observed: ObservedRank, work: Activity) -> None:
    observed.log.begin_phase(7, "update")
    with activity(Activity.BACKWARD):
        with activity(work):
            observed.request(0, 700, 80 * GIB, 0)
        assert current_activity() is Activity.BACKWARD
    assert observed.record.activity is work
    assert current_activity() is None


@pytest.mark.parametrize(("phase", "work"), [("sync", Activity.WEIGHT_SYNC), ("checkpoint", Activity.CHECKPOINT)])
def test_outside_of_all_marks_the_phase_names_the_work(observed: ObservedRank, phase: str, work: Activity) -> None:
    observed.log.begin_phase(7, phase)
    observed.request(0, 700, 80 * GIB, 0)
    assert observed.record.activity is work


def test_a_large_snapshot_is_not_pickled() -> None:
    assert small_pickle(SNAPSHOT) is not None
    blocks = [block(number, "inactive") for number in range(60_001)]
    assert small_pickle({"segments": [segment(*blocks)]}) is None


def test_in_an_autograd_thread_the_main_threads_stack_is_used() -> None:
    found: list[list[str]] = []

    def backward() -> None:
        thread = threading.Thread(target=lambda: found.append(stack()))
        thread.start()
        thread.join()

    backward()
    [lines] = found
    assert activity_of(lines) is Activity.BACKWARD
