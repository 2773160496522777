"""Reports of a shortage in words that nobody has seen before are never left without an answer."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.sizes import GIB, size_bytes


def diagnoses_of(line: str) -> list[Diagnosis]:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(f"start\n{line}\nend\n".encode()))
    return diagnose(builder.build())


@pytest.mark.parametrize(
    "prefix", ["", "(Worker pid=812, ip=10.0.0.4) ", "[rank3]: ", "2026-11-23 07:10:11,123 ERROR "]
)
@pytest.mark.parametrize(
    "line",
    [
        "GPU heap full",
        "panic: GPU heap full (need 4096 MiB)",
        "no more VRAM",
        "Aborting: no more VRAM",
        "device arena exhausted: wanted 12 GiB, have 3 GiB",
        "memory pool exhausted on device 0",
        "VRAM exhausted",
        "error: HBM is full on chip 3",
        "fatal: requested 12.5 GB but only 3.1 GB available on cuda:0",
        "Error: allocation of 4.00 GiB on device 0 failed",
        "E: failed to reserve 8 GiB of device memory",
        "CRITICAL GPU memory exhausted, giving up",
        "GPU 3 has no memory left",
        "Error: heap exhausted during garbage collection",
        "cuda:0 memory full",
        "ERROR: cannot fit tensor of 12 GiB: 3 GiB remaining on gpu 0",
        "RuntimeError: unable to grow device heap by 2048 MiB",
        "ERROR unable to satisfy request of 4 GiB (free: 1 GiB)",
    ],
)
def test_a_shortage_in_new_words_is_quoted(line: str, prefix: str) -> None:
    best = diagnoses_of(prefix + line)[0]
    assert best.confidence <= 0.55
    assert line in best.message


@pytest.mark.parametrize(
    "line",
    [
        "replay memory full, starting training",
        "experience memory is full",
        "connection pool exhausted",
        "ERROR: retry budget exhausted",
        "GPU memory usage: full precision",
        "[Full GC (Allocation Failure) heap 12M]",
        "vram: 24 GB, full fine-tuning needs 80 GB",
        "iterator exhausted",
        "using full GPU memory 80 GB",
        "WARNING: GPU memory is 95% full",
        "no GPU memory leak detected",
        "If VRAM is exhausted, lower the batch size",
        "model requires 12 GB, GPU has 80 GB",
        "fatal-free start: needed 12.1 GiB, has 79 GiB free",
        "Not enough free memory? Consider lowering batch size",
        "KV cache is full, preempting sequence",
        "ERROR: disk full",
        "Failed to load image; memory pool has 3 entries",
        "gpu memory pool initialized: requested 10 GiB, got 10 GiB",
        "ValueError: tensor requires 4 GB alignment",
        "the queue is full, error budget 3 GB",
    ],
)
def test_what_only_sounds_like_a_shortage_is_none(line: str) -> None:
    assert diagnoses_of(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "mpirun noticed that process rank 3 with PID 4123 on node n1 exited on signal 9 (Killed).",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
    ],
)
def test_launchers_of_mpi_report_a_kill(line: str) -> None:
    assert diagnoses_of(line)[0].failure_class is FailureClass.HOST_MEMORY


def test_the_error_of_torchs_cpp_side_is_the_gpus() -> None:
    found = diagnoses_of("terminate called after throwing an instance of 'c10::OutOfMemoryError'")
    assert [each.failure_class for each in found] == [FailureClass.UNKNOWN]


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: need 16G of memory but only have 3G free",
        "Error: requested 1,024 MiB of GPU memory, only 512 MiB free",
        "Error: requested 1.2.3 GB of GPU memory, only 512 MiB free",
        "Error: need 12 G, have 1..5 G of memory",
    ],
)
def test_sizes_in_any_form_cause_no_error(line: str) -> None:
    assert all(0 < diagnosis.confidence <= 0.8 for diagnosis in diagnoses_of(line))


@pytest.mark.parametrize(
    ("text", "size"),
    [("16G", 16 * GIB), ("1,024 MiB", GIB), ("1.2.3 GB", None), ("12 ZiB", None), ("9" * 15 + " GiB", None)],
)
def test_a_size_of_another_form_has_no_bytes(text: str, size: int | None) -> None:
    assert size_bytes(text) == size
