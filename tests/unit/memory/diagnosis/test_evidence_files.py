"""Evidence from files and directories: documents of RLJob, memory logs, snapshots and other files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_api.exit_codes import ExitCode
from rljob_api.metadata import Metadata
from rljob_api.step_report import Evidence as ReportedEvidence
from rljob_api.step_report import RankMemory, StepReport, StepReportStatus
from rljob_api.termination_message import TerminationMessage
from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import FailureKind, Unreadable, read_evidence
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.snapshot import failed_requests
from rljob_memory.sizes import GIB, MIB
from rljob_testing.memory_plans import memory_plan

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 80.00 GiB "
    "of which 1.00 GiB is free. Including non-PyTorch memory, this process has 40.00 GiB memory in use. Of the "
    "allocated memory 38.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
PLAN = memory_plan(rollout_sleep="Disabled", micro_batch_tokens=1024, logprob_chunk_tokens=256, sync_bucket_bytes=GIB)


def reported(message: str = MESSAGE) -> ReportedEvidence:
    return ReportedEvidence(
        time=datetime(2026, 5, 1, tzinfo=UTC),
        attempt=2,
        role="policy",
        rank=3,
        step=12,
        phase="update",
        micro_batch=5,
        message=message,
        memory=RankMemory(role="policy", rank=3, device_total_bytes=80 * GIB, device_free_bytes=GIB),
    )


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_termination_message_gives_the_place_of_the_failure(tmp_path: Path) -> None:
    message = TerminationMessage(exit_code=80, message="a GPU ran out of memory", step=11, evidence=reported())
    failure = read_evidence(write(tmp_path / "termination-log", message.to_json())).failure
    assert failure is not None
    assert (failure.role, failure.rank, failure.step, failure.phase, failure.micro_batch) == (
        "policy",
        3,
        12,
        "update",
        5,
    )
    assert failure.device is not None
    assert failure.device.requested_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("code", "failure_class"),
    [
        (ExitCode.DEVICE_OUT_OF_MEMORY, FailureClass.UNKNOWN),
        (ExitCode.HOST_OUT_OF_MEMORY, FailureClass.HOST_MEMORY),
        (ExitCode.SHARED_MEMORY_EXHAUSTED, FailureClass.SHARED_MEMORY),
    ],
)
def test_an_exit_code_alone_gives_the_kind_of_memory(
    tmp_path: Path, code: ExitCode, failure_class: FailureClass
) -> None:
    message = TerminationMessage(exit_code=code, message="the rank ended")
    diagnoses = diagnose(read_evidence(write(tmp_path / "message.json", message.to_json())))
    assert diagnoses[0].failure_class is failure_class


@pytest.mark.parametrize("code", [ExitCode.COMPLETE, ExitCode.WORKER_LOST, ExitCode.TERMINATED])
def test_an_exit_without_a_memory_cause_is_no_failure(tmp_path: Path, code: ExitCode) -> None:
    message = TerminationMessage(exit_code=code, message="the job ended")
    assert read_evidence(write(tmp_path / "message.json", message.to_json())).failure is None


def test_a_step_report_brings_its_plan(tmp_path: Path) -> None:
    report = StepReport(metadata=Metadata(name="digits"), status=StepReportStatus(plan=PLAN, last_evidence=reported()))
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


def test_a_run_directory_is_read_as_a_whole(tmp_path: Path) -> None:
    growing = [20 * GIB + index * 256 * MIB for index in range(12)]
    evidence = read_evidence(run_directory(tmp_path, growing))
    assert evidence.plan == PLAN
    assert evidence.versions == {"torch": "2.11.0"}
    best = diagnose(evidence)[0]
    assert best.failure_class is FailureClass.RETAINED_GRAPH
    assert best.numbers["growth_a_sample_bytes"] == 256 * MIB


def test_only_the_end_of_a_long_memory_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_directory(tmp_path, [20 * GIB + index * 256 * MIB for index in range(12)])
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


def test_memory_that_grows_and_shrinks_is_no_retained_graph(tmp_path: Path) -> None:
    sizes = [20 * GIB + (index % 5) * GIB for index in range(20)]
    classes = {diagnosis.failure_class for diagnosis in diagnose(read_evidence(run_directory(tmp_path, sizes)))}
    assert FailureClass.RETAINED_GRAPH not in classes


def test_weights_and_links_in_a_directory_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints" / "step-1" / "weights.pt", MESSAGE)
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert read_evidence(tmp_path).failure is None


def snapshot(requested: int, blocks: list[tuple[int, str]]) -> dict[str, Any]:
    total = sum(size for size, _ in blocks)
    segment = {
        "device": 0,
        "total_size": total,
        "allocated_size": sum(size for size, state in blocks if state == "active_allocated"),
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }
    event = {"action": "oom", "size": requested, "device_free": 512 * MIB, "frames": []}
    return {"segments": [segment], "device_traces": [[{"action": "alloc", "size": 5}, event]], "allocator_settings": {}}


def test_a_snapshot_shows_the_pieces_of_the_cache(tmp_path: Path) -> None:
    blocks = [(GIB, "active_allocated"), (GIB // 2, "inactive")] * 8
    path = write(tmp_path / "oom.pickle", pickle.dumps(snapshot(2 * GIB, blocks)))
    best = diagnose(read_evidence(path))[0]
    assert best.failure_class is FailureClass.FRAGMENTATION
    assert best.numbers["largest_cached_block_bytes"] == GIB // 2
    assert best.numbers["reserved_but_unallocated_bytes"] == 4 * GIB


def test_a_snapshot_without_a_failure_diagnoses_nothing(tmp_path: Path) -> None:
    content = snapshot(GIB, [(GIB, "active_allocated")]) | {"device_traces": [[]]}
    assert diagnose(read_evidence(write(tmp_path / "ok.pickle", pickle.dumps(content)))) == []


class _Harmful:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_a_pickle_that_runs_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    harmful = write(tmp_path / "snapshot.pickle", pickle.dumps({"segments": [_Harmful(tmp_path / "harm")]}))
    with pytest.raises(Unreadable, match=r"names posix.mkdir, and a snapshot holds only plain values"):
        read_evidence(harmful)
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
        read_evidence(write(tmp_path / "snapshot.pickle", content))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_a_snapshot_of_another_shape_is_read_without_an_error(value: Any) -> None:
    failed_requests({"segments": value, "device_traces": value})
    failed_requests({"segments": [value], "device_traces": [[{"action": "oom", "size": value, "device_free": value}]]})


def test_an_archive_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"found a gzip archive. Unpack it first."):
        read_evidence(write(tmp_path / "log.gz", gzip.compress(MESSAGE.encode())))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="No such file"):
        read_evidence(tmp_path / "missing.log")


def test_an_empty_file_and_an_empty_directory_hold_no_failure(tmp_path: Path) -> None:
    assert diagnose(read_evidence(write(tmp_path / "empty.log", b""))) == []
    (tmp_path / "empty").mkdir()
    assert diagnose(read_evidence(tmp_path / "empty")) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["exitCode", "message", "kind", "evidence", "plan"]), st.integers() | st.text()))
def test_json_with_unknown_keys_is_read_without_an_error(tmp_path: Path, value: dict[str, Any]) -> None:
    diagnose(read_evidence(write(tmp_path / "any.json", json.dumps(value))))


def test_a_traceback_in_a_json_line_gives_the_activity(tmp_path: Path) -> None:
    exception = f'Traceback (most recent call last):\n  File "/x/torch/optim/adamw.py", line 1, in step\n{MESSAGE}'
    line = json.dumps({"event": "the rank failed", "exception": exception, "timestamp": "2026-05-01T10:00:00Z"})
    failure = read_evidence(write(tmp_path / "controller.log", line)).failure
    assert failure is not None
    assert failure.kind is FailureKind.ALLOCATOR
    assert failure.activity is Activity.OPTIMIZER


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_a_log_in_another_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    text = mark + "step 1 memory is fine\r\n" * 9_000 + MESSAGE + "\r\n"
    evidence = read_evidence(write(tmp_path / "train.log", text.encode(encoding)))
    assert evidence.failure is not None
    assert evidence.failure.device is not None


def test_a_text_that_begins_like_an_archive_is_read(tmp_path: Path) -> None:
    assert read_evidence(write(tmp_path / "log", f"PKG-INFO is missing\n{MESSAGE}\n".encode())).failure is not None
