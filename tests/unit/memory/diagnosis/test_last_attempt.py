"""Choice of the failure to explain: the first one of the last failed attempt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.memory_failure import Activity, MemoryFailure
from rljob_memory.evidence import CollectedEvidence, FailureKind, read_evidence
from rljob_memory.evidence.failure import DeviceMemory, Failure
from rljob_memory.evidence.first_failure import of_last_attempt, without_duplicates
from rljob_memory.evidence.lines import marked_time, time_mark
from rljob_memory.sizes import GIB, MIB
from rljob_testing.memory_plans import BEGUN, memory_failure
from tests.unit.memory.diagnosis.recorded import torch_message


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(BEGUN + seconds, UTC)


def message(requested: int) -> str:
    """Another process holds 40 GiB."""
    own = "Including non-PyTorch memory, this process has 39.00 GiB memory in use. "
    others = "Process 7 has 40.00 GiB memory in use. Process 9 has 39.00 GiB memory in use. "
    return torch_message(requested, process=39, allocated=38).replace(own, others)


def write_run(
    directory: Path, logs: dict[str, list[str]], *, attempts: Sequence[float] = (0, 100), changes: Sequence[float] = ()
) -> Path:
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    for name, lines in logs.items():
        (directory / "logs" / f"{name}.log").write_text("".join(f"{line}\n" for line in lines))
    records: list[dict[str, Any]] = [
        *({"kind": "attempt", "attempt": number, "started_at": BEGUN + t} for number, t in enumerate(attempts, 1)),
        *({"kind": "plan_change", "change": {"generation": 2, "time": at(t).isoformat()}} for t in changes),
    ]
    (directory / "ledger.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return directory


def requested_gib(evidence: CollectedEvidence) -> int | None:
    device = evidence.failure.device if evidence.failure else None
    return None if device is None else device.requested_bytes // GIB


def failed(seconds: float, requested: int) -> list[str]:
    return [time_mark(at(seconds), "policy-0 failed"), message(requested)]


def in_json(seconds: float, requested: int) -> str:
    """The controller's own lines carry the time in their JSON."""
    stamp = at(seconds).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": "the attempt failed", "timestamp": stamp, "exception": message(requested)})


@pytest.mark.parametrize(
    ("logs", "times", "explained"),
    [
        ({"policy-0": [*failed(50, 2), *failed(150, 4)]}, {}, 4),
        ({"controller": [in_json(50, 2), in_json(150, 4)]}, {}, 4),
        # of several ranks the first
        (
            {"policy-0": failed(152, 2), "policy-1": [*failed(40, 8), *failed(151, 4)], "policy-2": failed(153, 6)},
            {},
            4,
        ),
        # a change of the plan has answered the first one
        ({"policy-0": [*failed(50, 2), *failed(70, 4)]}, {"attempts": [0], "changes": [51]}, 4),
        # the last attempt succeeded
        ({"policy-0": [*failed(50, 2), *failed(150, 4)]}, {"attempts": [0, 100, 200]}, 4),
        # without times the order counts
        ({"policy-0": [message(2), message(4)]}, {"attempts": [0]}, 2),
    ],
)
def test_the_first_failure_of_the_last_failed_attempt_is_explained(
    tmp_path: Path, logs: dict[str, list[str]], times: dict[str, Sequence[float]], explained: int
) -> None:
    assert requested_gib(read_evidence(write_run(tmp_path, logs, **times))) == explained


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)))
def test_a_time_mark_is_read_as_it_was_written(time: datetime) -> None:
    assert marked_time(time_mark(time, "policy-0 begins")) == pytest.approx(time.timestamp(), abs=1e-6)


@given(st.lists(st.floats(0, 1000), max_size=8), st.lists(st.none() | st.floats(0, 1000), max_size=12))
def test_no_failure_is_made_up_and_some_remain(restarts: list[float], times: list[float | None]) -> None:
    failures = [
        Failure(kind=FailureKind.DRIVER, step=number, clock=None if time is None else ("epoch", time))
        for number, time in enumerate(times)
    ]
    chosen = of_last_attempt(failures, restarts)
    assert [failure for failure in failures if failure in chosen] == chosen
    assert bool(chosen) == bool(failures)
    known = [time for time in times if time is not None]
    if known and restarts:
        assert max(failure.clock[1] for failure in chosen if failure.clock) == max(known)


CUMEM = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163"
WAKING = [
    "Traceback (most recent call last):",
    '  File "vllm/device_allocator/cumem.py", line 297, in wake_up',
    "    create_and_map(handle)",
    f"RuntimeError: {CUMEM}",
]


def test_of_two_messages_of_an_engine_the_raised_error_counts(tmp_path: Path) -> None:
    begun, failed_at = time_mark(at(1), "rollout-0 begins"), time_mark(at(60), "rollout-0 failed")
    run = write_run(tmp_path, {"rollout-0": [begun, CUMEM, failed_at, *WAKING]}, attempts=[0])
    failure = read_evidence(run).failure
    assert failure is not None
    assert (failure.kind, failure.activity) == (FailureKind.ENGINE_WAKE, Activity.WAKE)
    assert failure.clock == ("epoch", at(60).timestamp()), "not when the last line before it was written"


def test_cumem_output_is_explained_if_the_engine_raises_nothing(tmp_path: Path) -> None:
    logs = {"policy-0": failed(70, 2), "rollout-0": [time_mark(at(60), "rollout-0 begins"), CUMEM]}
    failure = read_evidence(write_run(tmp_path, logs, attempts=[0])).failure
    assert failure is not None
    assert (failure.kind, failure.text) == (FailureKind.ENGINE_WAKE, CUMEM)


# --- snapshots that a failing process wrote ---


def run_with_snapshot(directory: Path, logs: dict[str, list[str]], **changes: Any) -> CollectedEvidence:
    run = write_run(directory, logs)
    (run / "oom").mkdir()
    (run / "oom" / "policy-1-step7.json").write_text(memory_failure(**changes).model_dump_json(by_alias=True))
    return read_evidence(run)


def test_a_snapshot_alone_is_a_failure_with_all_its_numbers(tmp_path: Path) -> None:
    failure = run_with_snapshot(tmp_path, {}).failure
    assert failure is not None
    assert (failure.role, failure.rank, failure.step, failure.phase) == ("policy", 1, 7, "update")
    assert (failure.micro_batch, failure.activity) == (3, Activity.OPTIMIZER)
    assert failure.device == DeviceMemory(
        requested_bytes=4 * GIB + 3 * MIB,
        gpu=0,
        total_bytes=80 * GIB,
        free_bytes=GIB,
        allocated_bytes=38 * GIB,
        cached_bytes=GIB,
        largest_cached_block_bytes=600 * MIB,
    )


def test_a_snapshot_and_the_message_of_the_same_failure_are_one(tmp_path: Path) -> None:
    evidence = run_with_snapshot(tmp_path, {"policy-1": [message(4)]})
    failure = evidence.failure
    assert evidence.failures == 1
    assert failure is not None
    assert failure.device is not None
    assert failure.device.largest_cached_block_bytes == 600 * MIB, "only the snapshot knows it"
    assert [process.used_bytes for process in failure.device.others] == [40 * GIB], "only the message knows them"
    assert (failure.rank, failure.step, failure.source) == (1, 7, "logs/policy-1.log")


def test_a_snapshot_of_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    assert requested_gib(run_with_snapshot(tmp_path, {"policy-1": failed(150, 2)}, time=at(50))) == 2


def test_another_failure_is_not_joined_to_a_snapshot() -> None:
    snapshot = Failure(**{name: getattr(memory_failure(), name) for name in MemoryFailure.model_fields})
    other = Failure(
        kind=FailureKind.ALLOCATOR,
        device=DeviceMemory(requested_bytes=2 * GIB, free_bytes=GIB, allocated_bytes=38 * GIB),
    )
    assert without_duplicates([other], [snapshot]) == [other, snapshot]


@pytest.mark.parametrize("text", ["{}", '{"kind": "out_of_memory"}', '{"kind": "out_of_memory", "time": "x"', "[]"])
def test_a_damaged_snapshot_is_no_evidence_and_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "oom").mkdir()
    (tmp_path / "oom" / "policy-0-step1.json").write_text(text)
    assert read_evidence(tmp_path).failure is None


# --- memory before the failure ---


def sample(seconds: float, phase: str, allocated: int) -> dict[str, Any]:
    own = {"time": BEGUN + seconds, "step": 1, "phase": phase, "allocated": allocated, "reserved": allocated}
    return own | {"device_total": 80 * GIB}


@pytest.mark.parametrize(("logs", "expected"), [({"policy-0": failed(50, 2)}, [1, 2]), ({}, [3, 4])])
def test_samples_are_of_the_process_that_failed_or_the_last_one(
    tmp_path: Path, logs: dict[str, list[str]], expected: list[int]
) -> None:
    run = write_run(tmp_path, logs)
    (run / "memory").mkdir()
    samples = [sample(1, "load", 1), sample(40, "update", 2), sample(101, "load", 3), sample(140, "update", 4)]
    (run / "memory" / "policy-0.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in samples))
    [series] = read_evidence(run).series
    assert [one.allocated_bytes for one in series.samples] == expected
