"""Damaged evidence (truncated, interleaved, malformed, endless) raises nothing and gives no confident wrong cause."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.evidence.reports import read_report
from rljob_memory.evidence.run_files import read_ledger, read_memory_log, read_oom_snapshot
from rljob_testing.memory_plans import oom_snapshot
from tests.unit.memory.diagnosis.recorded import recorded_texts

TEXTS = {path: path.read_bytes() for path in recorded_texts()}
MIB = 1 << 20
_SURE = 0.8


def classes_of(log: bytes) -> dict[FailureClass, float]:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(log))
    return {found.failure_class: found.confidence for found in diagnose(builder.build())}


texts = st.sampled_from(sorted(TEXTS))


@given(texts, st.data())
def test_a_truncated_log_gets_no_confident_wrong_diagnosis(path: Any, data: st.DataObject) -> None:
    whole = TEXTS[path]
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    sure = {name for name, confidence in classes_of(whole[begin:end]).items() if confidence > _SURE}
    assert sure <= set(classes_of(whole)) | {FailureClass(path.parent.name)}


@given(texts, texts, st.randoms(use_true_random=False))
def test_interleaved_logs_get_no_confident_third_diagnosis(one: Any, other: Any, chance: Any) -> None:
    lines = [TEXTS[one].splitlines(keepends=True), TEXTS[other].splitlines(keepends=True)]
    mixed = b""
    while lines[0] or lines[1]:
        mixed += chance.choice([source for source in lines if source]).pop(0)
    sure = {name for name, confidence in classes_of(mixed).items() if confidence > _SURE}
    expected = {FailureClass(path.parent.name) for path in (one, other)}
    assert sure <= expected | set(classes_of(TEXTS[one])) | set(classes_of(TEXTS[other]))


@given(texts, st.data())
def test_damaged_bytes_are_skipped(path: Any, data: st.DataObject) -> None:
    damaged = bytearray(TEXTS[path])
    for _ in range(data.draw(st.integers(1, 30))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for found in classes_of(bytes(damaged)).values():
        assert 0 <= found <= 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
memory_lines = st.dictionaries(
    st.sampled_from(
        [
            *("time", "step", "phase", "micro_batch", "allocated", "reserved", "device_total"),
            *("host_used", "host_limit", "oom_kills", "shm_used", "shm_size"),
        ]
    ),
    json_values | st.sampled_from(["load", "update"]) | st.integers(0, 1 << 40),
)
ledger_lines = st.fixed_dictionaries(
    {"kind": st.sampled_from(["attempt", "plan_change", "step", "other"]) | json_values},
    optional={name: json_values for name in ("started_at", "plan", "versions", "change")},
)


@settings(max_examples=40)
@given(st.lists(memory_lines, max_size=6), st.lists(ledger_lines, max_size=3))
def test_a_runs_files_may_hold_anything(memory: list[dict[str, Any]], ledger: list[dict[str, Any]]) -> None:
    builder = EvidenceBuilder()
    read_memory_log(builder, BytesIO(b"\n".join(json.dumps(line).encode() for line in memory)), "policy-0")
    read_ledger(builder, BytesIO(b"\n".join(json.dumps(line).encode() for line in ledger)))
    for found in diagnose(builder.build()):
        json.dumps(found.as_dict())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(oom_snapshot().model_dump())), json_values, max_size=4))
def test_a_snapshot_with_other_values_is_read_or_ignored(changes: dict[str, Any]) -> None:
    text = json.dumps(oom_snapshot().model_dump() | changes)
    builder = EvidenceBuilder()
    assert read_oom_snapshot(builder, text, "oom") == bool(builder.snapshots)
    read_report(builder, text, "oom")
    for found in diagnose(builder.build()):
        json.dumps(found.as_dict())


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000])
def test_endlessly_nested_json_is_skipped(nested: str) -> None:
    builder = EvidenceBuilder()
    read_memory_log(builder, BytesIO(nested.encode()), "policy-0")
    read_ledger(builder, BytesIO(nested.encode()))
    assert not read_oom_snapshot(builder, nested, "oom")
    assert builder.build().failure is None


_READER = """
import resource, sys
from pathlib import Path
from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence import read_evidence
[best, *_] = diagnose(read_evidence(Path("-")))
print(best.failure_class, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def long_log(size_bytes: int) -> Iterator[bytes]:
    """Log of weeks: a line of metrics per step, including memory, and a failure at the end."""
    metrics = b" - ".join(b"actor/metric_%d: 0.0214" % number for number in range(60))
    steps = b"".join(b"(WorkerDict pid=%d) step:%d - %s\n" % (n % 64, n, metrics) for n in range(200))
    memory = b"(WorkerDict pid=7) After update, memory allocated (GB): 3.75, memory reserved (GB): 40.25\n" * 20
    block = steps + memory
    for _ in range(size_bytes // len(block)):
        yield block
    yield next(text for path, text in TEXTS.items() if path.parent.name == "Fragmentation")


def test_50_megabytes_through_a_pipe_take_no_more_memory_than_two() -> None:
    """Runs in a process of its own, which the kernel limits to 1 GiB of address space and 20 s of CPU time."""

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

    def peak(size_bytes: int) -> int:
        reader = subprocess.Popen(
            [sys.executable, "-c", _READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=limits
        )
        assert reader.stdin is not None
        for block in long_log(size_bytes):
            reader.stdin.write(block)
        output, _ = reader.communicate()
        failure_class, peak_bytes = output.decode().split()
        assert failure_class == "Fragmentation"
        return int(peak_bytes)

    assert peak(50 * MIB) < peak(2 * MIB) + 8 * MIB
