"""Failures are found in any log, regardless of the surrounding text."""

from __future__ import annotations

import json
import tracemalloc
from io import BufferedReader, BytesIO, RawIOBase
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence import Failure
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.evidence.plain_lines import plain_lines
from rljob_memory.sizes import GIB, MIB
from tests.unit.memory.diagnosis.recorded import evidence_of, torch_message

MESSAGE = torch_message(18.91, total=178.35, free=3.74, process=174.61, allocated=150, cached=19.68)
CONSEQUENCES = [
    "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600 ms",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 1167 closing signal SIGTERM",
]


def failure_in(text: str | bytes) -> Failure:
    failure = evidence_of(text).failure
    assert failure is not None
    return failure


@given(st.permutations(CONSEQUENCES), st.integers(0, len(CONSEQUENCES)))
def test_consequences_are_ignored_at_any_position(consequences: list[str], before: int) -> None:
    among = evidence_of("\n".join([*consequences[:before], MESSAGE, *consequences[before:]]))
    assert among.failure == failure_in(MESSAGE)
    assert among.failures == 1
    assert sum(among.secondary.values()) == len(CONSEQUENCES)


def test_consequences_alone_are_no_failure_of_memory() -> None:
    assert diagnose(evidence_of("\n".join(CONSEQUENCES))) == []


@pytest.mark.parametrize(
    ("log", "rank"),
    [
        # the earliest by its time, or else the first in the log
        (f"2026-05-01 10:00:09,120 [rank1]: {MESSAGE}\n2026-05-01 10:00:07,800 [rank0]: {MESSAGE}", 0),
        (f"[rank5]: {MESSAGE}\n[rank0]: {MESSAGE}", 5),
        *((f"{escape}[1;36m(Worker rank=3 pid=812){escape}[0m {MESSAGE}", 3) for escape in ("^[", "\\x1b", "␛", "")),
    ],
)
def test_the_rank_is_that_of_the_first_failure(log: str, rank: int) -> None:
    assert failure_in(log).rank == rank


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.", {"wanted_bytes": 8 * GIB}),
        (
            "RuntimeError: Insufficient space in /dev/shm for shared-memory message queue: 240 MiB required",
            {"wanted_bytes": 240 * MIB},
        ),
    ],
)
def test_the_sizes_of_other_messages_are_read(line: str, sizes: dict[str, int]) -> None:
    assert failure_in(line).sizes == sizes


def test_interleaved_tracebacks_are_separated_by_process() -> None:
    log = [
        '(PolicyActor pid=11)   File "/x/torch/optim/adamw.py", line 606, in _multi_tensor_adamw',
        '(RolloutActor pid=22)   File "/x/vllm/v1/engine/core.py", line 1, in generate',
        "(PolicyActor pid=11)     exp_avg_sq_sqrt = torch._foreach_sqrt(x)",
        "(RolloutActor pid=22)     return self.step()",
        f"(PolicyActor pid=11) {MESSAGE}",
    ]
    assert failure_in("\n".join(log)).activity is Activity.OPTIMIZER


def test_a_message_wrapped_within_a_word_is_read_whole() -> None:
    failure = failure_in(f"[rank4]: {MESSAGE[:190]}\n{MESSAGE[190:]}\n")
    assert failure.rank == 4
    assert failure.device is not None
    assert failure.device.allocated_bytes == 150 * GIB


def test_a_traceback_that_the_program_survived_is_ignored() -> None:
    survived = '  File "/x/torch/optim/adamw.py", line 1, in step\n    self._init_group()\nValueError: no\n'
    assert failure_in(survived + "step 1 reward 0.5\n" * 2_000 + MESSAGE).activity is None


def test_the_engines_report_of_its_sleep_is_kept() -> None:
    engine = evidence_of("INFO [gpu_worker.py:115] Sleep mode freed 0.00 GiB memory, 63.15 GiB memory is still in use.")
    assert (engine.engine.asleep, engine.engine.freed_bytes) == (True, 0)
    assert engine.engine.still_in_use_bytes == round(63.15 * GIB)


class _LongLog(RawIOBase):
    """`size` bytes of ordinary lines with one failure at the end, generated piecewise."""

    def __init__(self, size: int) -> None:
        self._block = b"(WorkerDict pid=7) step:12 - actor/loss:0.013 - reward/mean:0.51 tokens 1024 it/s\n" * 800
        self._blocks = size // len(self._block)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray, /) -> int:  # type: ignore[override]
        if self._blocks < 0:
            return 0
        text = self._block if self._blocks else MESSAGE.encode()
        self._blocks -= 1
        buffer[: len(text)] = text
        return len(text)


def test_a_long_log_takes_no_more_memory_than_a_short_one() -> None:
    builder = EvidenceBuilder()
    # The bound leaves room for what other threads of this process allocate meanwhile.
    stream = BufferedReader(cast(Any, _LongLog(2 * MIB)), buffer_size=1 << 17)
    tracemalloc.start()
    LogReader(builder).read(stream)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert builder.build().failure is not None
    assert peak_bytes < MIB


def test_a_file_without_line_ends_is_read_in_pieces() -> None:
    failure = failure_in(b"x" * (3 << 20) + MESSAGE.encode() + b"y" * (1 << 20))
    assert failure.device is not None
    assert failure.device.requested_bytes == round(18.91 * GIB)


# --- lines as a program printed them, out of JSON, HTML, escapes and terminals that broke them ---

FRAME = '  File "/env/site-packages/torch/optim/adamw.py", line 606, in _multi_tensor_adamw'
REPEATED = json.dumps(f"Traceback (most recent call last):\n{FRAME}\n    func(\nValueError: x")


def lines_of(text: str) -> list[str]:
    return [line.decode().rstrip("\r\n") for line in plain_lines(BytesIO(text.encode()))]


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        (
            json.dumps({"time": "2026-03-04T10:11:12Z", "level": "ERROR", "message": "first\nsecond"}),
            ["2026-03-04T10:11:12Z first", "2026-03-04T10:11:12Z second"],
        ),
        (r'{"level": "ERROR", "message": "CUDA out of memory \ud83d"}', [r"CUDA out of memory \ud83d"]),
        (REPEATED, ['"Traceback (most recent call last):', FRAME, "    func(", 'ValueError: x"']),
        (
            '<span class="err">File &quot;/a.py&quot;, line 3, in step</span><br>',
            ['File "/a.py", line 3, in step'],
        ),
        # frames in one line, with their code
        (
            'Traceback: File "/a.py", line 1, in main run() File "/b.py", line 2, in step opt.step() RuntimeError: no',
            [
                *("Traceback: ", '  File "/a.py", line 1, in main', "    run() "),
                *('  File "/b.py", line 2, in step', "    opt.step()", "RuntimeError: no"),
            ],
        ),
    ],
)
def test_lines_are_those_of_the_program(printed: str, lines: list[str]) -> None:
    assert lines_of(printed) == lines


@pytest.mark.parametrize(
    "text",
    [
        "step 1\n  indented\ta < b && c > d\r\nno end",
        "cell <torch.Tensor> at <module>",
        r"C:\new\nets\train.py and C:\new\notes",
        '  File "/env/lib/pyth\nstep 3\nstep 4\nstep 5',
        # JSON whose fields are the content
        '{"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "x"}}}',
        '{"event": "step", "step": 3, "allocated_gb": 12.3}',
        '{"message": ["a", "list"]}',
        '{"message": "torn',
    ],
)
def test_other_lines_are_left_as_they_are(text: str) -> None:
    assert b"".join(plain_lines(BytesIO(text.encode()))) == text.encode()


@pytest.mark.parametrize("width", range(12, FRAME.index("in _"), 5))
def test_a_broken_frame_is_one_line(width: int) -> None:
    first, *rest = lines_of(f"{FRAME[:width].rstrip()}\n{FRAME[width:]}\n    func(")
    assert "".join(first.split()) == "".join(FRAME.split())
    assert rest == ["    func("]
