"""Evidence from files, directories and exceptions: documents of RLJob, memory logs, snapshots, containers, others."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_failure import Activity
from rljob_api.metadata import Metadata
from rljob_api.step_report import Evidence as ReportedEvidence
from rljob_api.step_report import RankMemory, StepReport, StepReportStatus
from rljob_api.termination_message import TerminationMessage
from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence import Failure, FailureKind, Unreadable, account_of, read_evidence
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.facts import shared_memory_of
from rljob_memory.evidence.snapshot import failed_requests
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB
from rljob_testing.memory_plans import memory_plan
from tests.unit.memory.diagnosis.recorded import torch_message

MESSAGE = torch_message(4, process=40, allocated=38)
PLAN = memory_plan(rollout_sleep="Disabled", micro_batch_tokens=1024, logprob_chunk_tokens=256, sync_bucket_bytes=GIB)
REPORTED = ReportedEvidence(
    time=datetime(2026, 5, 1, tzinfo=UTC),
    attempt=2,
    role="policy",
    rank=3,
    step=12,
    phase="update",
    micro_batch=5,
    message=MESSAGE,
    memory=RankMemory(role="policy", rank=3, device_total_bytes=80 * GIB, device_free_bytes=GIB),
)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def diagnoses_in(path: Path, content: str | bytes) -> list[Diagnosis]:
    return diagnose(read_evidence(write(path, content)))


def failure_in(path: Path, content: str | bytes) -> Failure:
    failure = read_evidence(write(path, content)).failure
    assert failure is not None
    return failure


# --- documents of a job ---


def test_a_termination_message_gives_the_place_of_the_failure(tmp_path: Path) -> None:
    message = TerminationMessage(exit_code=80, message="a GPU ran out of memory", step=11, evidence=REPORTED)
    failure = failure_in(tmp_path / "termination-log", message.to_json())
    assert (failure.role, failure.rank, failure.step, failure.phase) == ("policy", 3, 12, "update")
    assert failure.micro_batch == 5
    assert failure.device is not None
    assert failure.device.requested_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("code", "classes"),
    [
        (ExitCode.DEVICE_OUT_OF_MEMORY, [FailureClass.UNKNOWN]),
        (ExitCode.HOST_OUT_OF_MEMORY, [FailureClass.HOST_MEMORY]),
        (ExitCode.SHARED_MEMORY_EXHAUSTED, [FailureClass.SHARED_MEMORY]),
        (ExitCode.COMPLETE, []),
        (ExitCode.WORKER_LOST, []),
    ],
)
def test_an_exit_code_alone_gives_the_kind_of_memory(tmp_path: Path, code: ExitCode, classes: list[str]) -> None:
    message = TerminationMessage(exit_code=code, message="the rank ended").to_json()
    assert [each.failure_class for each in diagnoses_in(tmp_path / "message.json", message)][:1] == classes


def test_a_step_report_brings_its_plan(tmp_path: Path) -> None:
    report = StepReport(metadata=Metadata(name="digits"), status=StepReportStatus(plan=PLAN, last_evidence=REPORTED))
    evidence = read_evidence(write(tmp_path / "report.json", report.model_dump_json(by_alias=True)))
    assert evidence.plan == PLAN
    # 39 GiB are another process's, and the plan lets the engine stay awake.
    assert diagnose(evidence)[0].failure_class is FailureClass.ENGINE_NOT_ASLEEP


def run_directory(path: Path, allocated: list[int]) -> Path:
    samples = [
        {"time": 0.0, "step": 7, "phase": "update", "micro_batch": index, "allocated": size, "reserved": size + MIB}
        | {"device_total": 80 * GIB, "device_free": GIB}
        for index, size in enumerate(allocated)
    ]
    write(path / "memory" / "policy-0.jsonl", "".join(f"{json.dumps(sample)}\n" for sample in samples) + '{"torn": ')
    attempt = {"kind": "attempt", "attempt": 1, "started_at": 0.0, "resumed_from": 0, "versions": {"torch": "2.11.0"}}
    write(path / "ledger.jsonl", json.dumps(attempt | {"plan": PLAN.model_dump(by_alias=True)}) + "\n")
    write(path / "logs" / "controller.log", f"starting\n[rank0]: {MESSAGE}\n")
    return path


GROWING = [20 * GIB + index * 256 * MIB for index in range(12)]


def test_a_run_directory_is_read_as_a_whole(tmp_path: Path) -> None:
    evidence = read_evidence(run_directory(tmp_path, GROWING))
    assert evidence.plan == PLAN
    assert evidence.versions == {"torch": "2.11.0"}
    best = diagnose(evidence)[0]
    assert best.failure_class is FailureClass.RETAINED_GRAPH
    assert best.numbers["growth_per_sample_bytes"] == 256 * MIB


def test_only_the_end_of_a_long_memory_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_directory(tmp_path, GROWING)
    log = directory / "memory" / "policy-0.jsonl"
    whole = log.read_text()
    earlier = json.loads(whole.splitlines()[0])
    shrinking = [{**earlier, "allocated": size * GIB} for size in (60, 5)]
    log.write_text("".join(f"{json.dumps(sample)}\n" for sample in shrinking * 50) + whole)
    write(log.with_name("policy-0.jsonl.old"), f"{MESSAGE}\n" * 3)
    monkeypatch.setattr("rljob_memory.evidence.read._MEMORY_LOG_BYTES", len(whole) + 10)
    evidence = read_evidence(directory)
    assert [len(series.samples) for series in evidence.series] == [12]
    assert evidence.failures == 1
    assert diagnose(evidence)[0].failure_class is FailureClass.RETAINED_GRAPH


def test_micro_batches_whose_memory_comes_and_goes_retain_no_graph(tmp_path: Path) -> None:
    evidence = read_evidence(run_directory(tmp_path, [20 * GIB + (index % 5) * GIB for index in range(20)]))
    assert FailureClass.RETAINED_GRAPH not in {found.failure_class for found in diagnose(evidence)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["exitCode", "message", "kind", "evidence", "plan"]), st.integers() | st.text()))
def test_json_with_unknown_keys_is_read_without_an_error(tmp_path: Path, value: dict[str, Any]) -> None:
    diagnoses_in(tmp_path / "any.json", json.dumps(value))


# --- other files ---


def test_weights_and_links_in_a_directory_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints" / "step-1" / "weights.pt", MESSAGE)
    write(tmp_path / "empty.log", b"")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert read_evidence(tmp_path).failure is None


def test_an_archive_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"found a gzip archive. Unpack it first."):
        diagnoses_in(tmp_path / "log.gz", gzip.compress(MESSAGE.encode()))
    with pytest.raises(Unreadable, match="No such file"):
        read_evidence(tmp_path / "missing.log")


def test_a_traceback_in_a_json_line_gives_the_activity(tmp_path: Path) -> None:
    exception = f'Traceback (most recent call last):\n  File "/x/torch/optim/adamw.py", line 1, in step\n{MESSAGE}'
    line = json.dumps({"event": "the rank failed", "exception": exception, "timestamp": "2026-05-01T10:00:00Z"})
    failure = failure_in(tmp_path / "controller.log", line)
    assert (failure.kind, failure.activity) == (FailureKind.ALLOCATOR, Activity.OPTIMIZER)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_a_log_in_another_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    text = mark + "step 1 memory is fine\r\n" * 9_000 + MESSAGE + "\r\n"
    assert failure_in(tmp_path / "train.log", text.encode(encoding)).device is not None


def test_a_text_that_begins_like_an_archive_is_read(tmp_path: Path) -> None:
    assert failure_in(tmp_path / "log", f"PKG-INFO is missing\n{MESSAGE}\n")


# --- torch's snapshots ---


def snapshot(requested: int, blocks: list[tuple[int, str]]) -> dict[str, Any]:
    segment = {
        "device": 0,
        "total_size": sum(size for size, _ in blocks),
        "allocated_size": sum(size for size, state in blocks if state == "active_allocated"),
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }
    event = {"action": "oom", "size": requested, "device_free": 512 * MIB, "frames": []}
    return {"segments": [segment], "device_traces": [[{"action": "alloc", "size": 5}, event]], "allocator_settings": {}}


def test_a_snapshot_shows_the_pieces_of_the_cache(tmp_path: Path) -> None:
    blocks = [(GIB, "active_allocated"), (GIB // 2, "inactive")] * 8
    best = diagnoses_in(tmp_path / "oom.pickle", pickle.dumps(snapshot(2 * GIB, blocks)))[0]
    assert best.failure_class is FailureClass.FRAGMENTATION
    assert best.numbers["largest_cached_block_bytes"] == GIB // 2
    assert best.numbers["reserved_but_unallocated_bytes"] == 4 * GIB


def test_a_snapshot_without_a_failure_diagnoses_nothing(tmp_path: Path) -> None:
    content = snapshot(GIB, [(GIB, "active_allocated")]) | {"device_traces": [[]]}
    assert diagnoses_in(tmp_path / "ok.pickle", pickle.dumps(content)) == []


class _Harmful:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_a_pickle_that_runs_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    harmful = pickle.dumps({"segments": [_Harmful(tmp_path / "harm")]})
    with pytest.raises(Unreadable, match=r"names posix.mkdir, and a snapshot holds only plain values"):
        diagnoses_in(tmp_path / "snapshot.pickle", harmful)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(snapshot(GIB, [(GIB, "inactive")]))[:-20],
        pickle.dumps([1, 2, 3]),
        b"\x80\x04r\xff\xff\xff\xff.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f",
    ],
    ids=["cut short", "another pickle", "a memo of 64 GiB", "an array of 8 EiB"],
)
def test_a_damaged_pickle_is_refused_with_a_message(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(Unreadable, match="expected a snapshot"):
        diagnoses_in(tmp_path / "snapshot.pickle", content)


@example([[{"action": "alloc"}]])
@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_a_snapshot_of_another_shape_is_read_without_an_error(value: Any) -> None:
    failed_requests({"segments": value, "device_traces": value})
    failed_requests({"segments": [value], "device_traces": [[{"action": "oom", "size": value, "device_free": value}]]})


# --- host memory of a container ---

KILLED = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n"
BUS_ERROR = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.\n"


def memory_log(*samples: dict[str, int]) -> str:
    common = {"step": 1, "phase": "update", "allocated": 0, "reserved": 0, "host_limit": 8 * GIB}
    return "".join(json.dumps({"time": 100.0 + at} | common | one) + "\n" for at, one in enumerate(samples))


@pytest.mark.parametrize(
    ("files", "failure_class", "confidence"),
    [
        ({"train.log": KILLED}, "HostMemory", 0.45),
        (
            {"train.log": KILLED, "cgroup/memory.max": f"{8 * GIB}\n", "cgroup/memory.current": f"{8 * GIB - MIB}\n"},
            "HostMemory",
            0.6,
        ),
        ({"train.log": KILLED, "memory/policy-0.jsonl": memory_log({"oom_kills": 1})}, "HostMemory", 0.6),
        ({"train.log": BUS_ERROR + "tmpfs           65536     0 65536   0% /dev/shm\n"}, "SharedMemory", 0.21),
        ({"train.log": BUS_ERROR}, "SharedMemory", 0.54),
        ({"train.log": BUS_ERROR + "shm              64M   64M     0 100% /dev/shm\n"}, "SharedMemory", 0.6),
    ],
)
def test_figures_of_the_container_make_a_kill_more_certain(
    tmp_path: Path, files: dict[str, str], failure_class: str, confidence: float
) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    found = {str(one.failure_class): one.confidence for one in diagnose(read_evidence(tmp_path))}
    assert found[failure_class] == confidence


def test_without_a_limit_a_kill_gives_no_evidence(tmp_path: Path) -> None:
    for name, text in {"memory.max": "max\n", "memory.limit_in_bytes": "9223372036854771712"}.items():
        write(tmp_path / name, text)
    assert read_evidence(tmp_path).host == MemorySample()


def test_an_increased_kill_count_is_a_failure_with_the_memory_in_use(tmp_path: Path) -> None:
    log = memory_log({"host_used": 3 * GIB}, {"host_used": 7 * GIB}, {"host_used": GIB, "oom_kills": 1})
    write(tmp_path / "memory" / "policy-0.jsonl", log)
    evidence = read_evidence(tmp_path)
    [best] = diagnose(evidence)
    assert best.failure_class is FailureClass.HOST_MEMORY
    assert (best.numbers["used_bytes"], best.numbers["limit_bytes"]) == (7 * GIB, 8 * GIB)
    assert evidence.failure is not None
    assert evidence.failure.clock == ("epoch", 101.0), "between this sample and the next"


def test_a_new_container_counts_from_its_own_start(tmp_path: Path) -> None:
    log = memory_log({"oom_kills": 1}, {"oom_kills": 1}, {}, {"oom_kills": 0})
    write(tmp_path / "memory" / "policy-0.jsonl", log)
    assert read_evidence(tmp_path).failure is None


@pytest.mark.parametrize(
    ("line", "used", "size"),
    [
        ("shm                 64M   63.5M  500K  99% /dev/shm", round(63.5 * MIB), 64 * MIB),
        ("tmpfs          24684084       8 24684076   1% /dev/shm", 8 << 10, 24684084 << 10),
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
    builder = EvidenceBuilder(host=one)
    builder.add_host(other)
    both = builder.host
    assert both.oom_kills == max(one.oom_kills, other.oom_kills)
    for mine in (one, other):
        assert both.host_used_bytes >= mine.host_used_bytes
        assert not mine.host_limit_bytes or both.host_limit_bytes


# --- exceptions ---


def raised(error: Exception, file: str = "train.py", function: str = "main") -> Exception:
    """`error`, raised in `function` of `file`."""
    namespace: dict[str, Any] = {}
    exec(compile(f"def {function}(error):\n    raise error", file, "exec"), namespace)
    try:
        namespace[function](error)
    except Exception as caught:
        return caught
    raise AssertionError


def chained(error: Exception, cause: Exception, *, cyclic: bool = False) -> Exception:
    error.__cause__ = cause
    if cyclic:
        cause.__context__ = error
    return error


@pytest.mark.parametrize(
    ("error", "kind", "activity"),
    [
        (
            raised(RuntimeError(MESSAGE), "torch/optim/adamw.py", "_init_group"),
            FailureKind.ALLOCATOR,
            Activity.OPTIMIZER,
        ),
        (raised(MemoryError()), FailureKind.HOST, None),
        (raised(OSError(28, "No space left on device", "/dev/shm/psm_1")), FailureKind.SHARED_MEMORY, None),
        (raised(RuntimeError("CUDA error: out of memory\nasynchronously reported")), FailureKind.DRIVER, None),
        # the cause comes first, and a cycle is visited once
        (
            chained(
                raised(ValueError("No available memory for the cache blocks")),
                raised(RuntimeError(MESSAGE), "vllm/worker.py", "load_model"),
            ),
            FailureKind.ALLOCATOR,
            Activity.MODEL_LOAD,
        ),
        (chained(RuntimeError(MESSAGE), RuntimeError("retried"), cyclic=True), FailureKind.ALLOCATOR, None),
    ],
)
def test_an_exception_gives_its_failure(error: Exception, kind: FailureKind, activity: Activity | None) -> None:
    failure = account_of(error)
    assert failure is not None
    assert (failure.kind, failure.activity) == (kind, activity)
    assert kind is not FailureKind.ALLOCATOR or (failure.device and failure.device.allocated_bytes == 38 * GIB)


def test_other_exceptions_give_no_failure() -> None:
    assert account_of(raised(ValueError("shapes do not match"))) is None
