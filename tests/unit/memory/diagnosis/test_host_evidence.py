"""Host memory numbers of a container as evidence for killed processes and bus errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import read_evidence
from rljob_memory.evidence.host import merged, shared_memory_of
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB

KILLED = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n"
BUS_ERROR = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.\n"


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def confidence(directory: Path, failure_class: FailureClass) -> float:
    [found] = [one for one in diagnose(read_evidence(directory)) if one.failure_class is failure_class]
    return found.confidence


def memory_log(*samples: dict[str, int]) -> str:
    common = {"step": 1, "phase": "update", "allocated": 0, "reserved": 0, "host_limit": 8 * GIB}
    return "".join(json.dumps({"time": 100.0 + at} | common | one) + "\n" for at, one in enumerate(samples))


def test_a_kill_at_the_containers_limit_is_the_kernels(tmp_path: Path) -> None:
    alone = write(tmp_path / "a", {"train.log": KILLED})
    files = {"train.log": KILLED, "cgroup/memory.max": f"{8 * GIB}\n", "cgroup/memory.current": f"{8 * GIB - MIB}\n"}
    at_limit = write(tmp_path / "b", files)
    counted = write(tmp_path / "c", {"train.log": KILLED, "memory/policy-0.jsonl": memory_log({"oom_kills": 1})})
    confidences = [confidence(run, FailureClass.HOST_MEMORY) for run in (alone, at_limit, counted)]
    assert confidences == sorted(confidences)
    assert confidences[0] < 0.6 < 0.8 <= confidences[1] < confidences[2]


def test_without_a_limit_a_kill_gives_no_evidence(tmp_path: Path) -> None:
    run = write(tmp_path, {"train.log": KILLED, "memory.max": "max\n", "memory.limit_in_bytes": "9223372036854771712"})
    assert read_evidence(run).host == MemorySample()


def test_an_increased_kill_count_is_a_failure_with_the_memory_in_use(tmp_path: Path) -> None:
    log = memory_log({"host_used": 3 * GIB}, {"host_used": 7 * GIB}, {"host_used": GIB, "oom_kills": 1})
    evidence = read_evidence(write(tmp_path, {"memory/policy-0.jsonl": log}))
    [best] = diagnose(evidence)
    assert best.failure_class is FailureClass.HOST_MEMORY
    assert (best.numbers["used_bytes"], best.numbers["limit_bytes"]) == (7 * GIB, 8 * GIB)
    assert evidence.failure is not None
    assert evidence.failure.clock == ("epoch", 101.0), "between this sample and the next"


def test_a_new_container_counts_from_its_own_start(tmp_path: Path) -> None:
    log = memory_log({"oom_kills": 1}, {"oom_kills": 1}, {}, {"oom_kills": 0})
    assert read_evidence(write(tmp_path, {"memory/policy-0.jsonl": log})).failure is None


def test_a_bus_error_is_shared_memory_more_surely_if_dev_shm_is_full(tmp_path: Path) -> None:
    full = write(tmp_path / "a", {"train.log": BUS_ERROR + "shm              64M   64M     0 100% /dev/shm\n"})
    empty = write(tmp_path / "b", {"train.log": BUS_ERROR + "tmpfs           65536     0 65536   0% /dev/shm\n"})
    alone = write(tmp_path / "c", {"train.log": BUS_ERROR})
    confidences = [confidence(run, FailureClass.SHARED_MEMORY) for run in (empty, alone, full)]
    assert confidences == [0.4, 0.7, 0.9]


@pytest.mark.parametrize(
    ("line", "used", "size"),
    [
        ("shm                 64M   63.5M  500K  99% /dev/shm", round(63.5 * MIB), 64 * MIB),
        ("tmpfs          24684084       8 24684076   1% /dev/shm", 8 << 10, 24684084 << 10),
        ("tmpfs               16G  1.0G   15G   7% /dev/shm", GIB, 16 * GIB),
    ],
)
def test_df_output_is_read_with_and_without_units(line: str, used: int, size: int) -> None:
    assert shared_memory_of(line) == MemorySample(shared_memory_used_bytes=used, shared_memory_bytes=size)


@given(st.text(max_size=120))
def test_other_lines_are_not_read_as_df(line: str) -> None:
    assert shared_memory_of(line) is None


records = st.builds(
    MemorySample,
    host_used_bytes=st.integers(0, GIB),
    host_limit_bytes=st.integers(0, GIB),
    oom_kills=st.integers(0, 3),
    shared_memory_used_bytes=st.integers(0, GIB),
    shared_memory_bytes=st.integers(0, GIB),
)


@given(records, records)
def test_two_merged_records_keep_all_values(one: MemorySample, other: MemorySample) -> None:
    both = merged(one, other)
    assert both.oom_kills == max(one.oom_kills, other.oom_kills)
    for mine in (one, other):
        assert both.host_used_bytes >= mine.host_used_bytes
        assert not mine.host_limit_bytes or both.host_limit_bytes
