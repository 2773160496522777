"""Logs that only look like those of a failure: the rules for families of wordings leave them alone."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader

PROCESS = "|    {}   N/A  N/A   {}      C   python      {}MiB |"
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
KILLED_BY_RAY = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."


def diagnoses_of(*lines: str) -> list[Diagnosis]:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO("\n".join(lines).encode()))
    return diagnose(builder.build())


INNOCENT = {
    "crashes that Ray counts beside no kill, in a broken line": (
        "(raylet) node_manager.cc:3007: 0 Workers (tasks /",
        " actors) killed due to memory pressure (OOM), 2 Workers crashed due to other reasons",
    ),
    "a second try with less": (f"W {FULL}", "W retrying with batch size 4", "I step 1 is done, memory is fine"),
    "a room for tokens that is smaller than the wish": (
        "max_total_tokens=131072 is larger than the profiled value 90112. Use the profiled value instead.",
    ),
    "a sleep of level 2, which drops the weights": (
        "CuMemAllocator: sleep freed 60.11 GiB memory in total, of which 0.00 GiB is backed up in CPU and the rest "
        "60.11 GiB is discarded directly.",
        "Sleep mode freed 61.50 GiB memory, 7.25 GiB memory is still in use.",
        '"POST /sleep?level=2 HTTP/1.1" 200 OK',
    ),
    "a sleep of level 1 that backs up the weights": (
        "CuMemAllocator: sleep freed 60.11 GiB memory in total, of which 14.20 GiB is backed up in CPU and the rest "
        "45.91 GiB is discarded directly.",
        "Sleep mode freed 61.50 GiB memory, 20.25 GiB memory is still in use.",
        '"POST /sleep?level=1 HTTP/1.1" 200 OK',
    ),
    "sleeps beside a model whose optimizer arrives": (
        "Sleep mode freed 61.50 GiB memory, 3.25 GiB memory is still in use.",
        "Sleep mode freed 61.50 GiB memory, 20.25 GiB memory is still in use.",
        "Sleep mode freed 61.50 GiB memory, 34.25 GiB memory is still in use.",
    ),
    "one process on each GPU": tuple(PROCESS.format(gpu, 4000 + gpu, 31_000 + gpu) for gpu in range(8)),
    "a few small processes beside a large one": (
        PROCESS.format(0, 41, 26_100),
        PROCESS.format(0, 42, 871),
        PROCESS.format(0, 43, 420),
        PROCESS.format(0, 44, 700),
    ),
    "servers that are all alike": tuple(PROCESS.format(0, 60 + number, 871) for number in range(6)),
    "figures from all over a program": tuple(
        f"CUDA memory in use: {size}000000000" for size in (1, 5, 5, 8, 12, 20, 26)
    ),
    "the optimizer's state in figures of steps": tuple(
        f"CUDA memory after step: {size}000000000" for size in (10, 30, 30, 30, 30, 30)
    ),
    "steps whose memory comes and goes": tuple(
        f"CUDA memory after step: {size}000000000" for size in (10, 12, 14, 22, 16, 24)
    ),
    "memory of a GPU that is shared": ("orig free=358350848 total=4227727360 limit=4294967296 usage=8520704",),
    "a traceback of another error": (
        '  File "/opt/vllm/v1/core/kv_cache_utils.py", line 699, in check_memory',
        '    raise ValueError("max_model_len is too large for this model")',
    ),
    "a pod that no node has room for": (
        "Warning  FailedScheduling  0/5 nodes are available: 5 Insufficient memory. preemption: failed to find victims",
    ),
    "a table of memory that is not Ray's": ("PID  RSS  COMMAND", "4012  11.2  python train.py"),
}


@pytest.mark.parametrize("log", INNOCENT)
def test_an_innocent_log_has_no_diagnosis(log: str) -> None:
    assert diagnoses_of(*INNOCENT[log]) == []


STILL_FAILURES = {
    "kills that Ray counts, in a broken line": (
        "(raylet) node_manager.cc:3007: 2 Workers (tasks /",
        " actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons",
    ),
    "a retry that fails as well": (FULL, "retrying with batch size 4", "step 1", FULL),
    "a retry whose end is not in the log": ("step 1", FULL, "retrying with batch size 4"),
    "a fallback long before": ("falling back to eager mode", "step 1", FULL),
    "a worker that Ray starts again": (KILLED_BY_RAY, "Retrying on another node.", "step 2"),
}


@pytest.mark.parametrize("log", STILL_FAILURES)
def test_a_failure_beside_a_retry_is_diagnosed(log: str) -> None:
    assert len(diagnoses_of(*STILL_FAILURES[log])) > 0


OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {} (GPU 0; 24.00 GiB total capacity; {} already allocated; "
    "{} free; {} reserved in total by PyTorch)"
)

CARDS = {
    "others hold most of it": (
        FailureClass.FOREIGN_PROCESS,
        OLD.format("32.00 MiB", "3.10 GiB", "20.10 MiB", "3.60 GiB"),
    ),
    "torch's own pieces": (FailureClass.FRAGMENTATION, OLD.format("2.00 GiB", "15.10 GiB", "20.10 MiB", "22.60 GiB")),
    "others, and larger pieces": (
        FailureClass.FRAGMENTATION,
        OLD.format("1.00 GiB", "9.10 GiB", "20.10 MiB", "17.60 GiB"),
    ),
    "a few pieces, and nobody else": (
        FailureClass.UNKNOWN,
        OLD.format("10.00 MiB", "22.80 GiB", "1.10 MiB", "23.20 GiB"),
    ),
}


@pytest.mark.parametrize("card", CARDS)
def test_the_largest_unexpected_item_of_the_gpu_is_the_cause(card: str) -> None:
    expected, message = CARDS[card]
    assert diagnoses_of(message)[0].failure_class is expected
