"""Failures are found in any log, regardless of the surrounding text."""

from __future__ import annotations

import json
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence import Failure
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.plain_lines import plain_lines
from rljob_memory.sizes import GIB
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


def test_interleaved_tracebacks_are_separated_by_process() -> None:
    log = [
        '(PolicyActor pid=11)   File "/x/torch/optim/adamw.py", line 606, in _multi_tensor_adamw',
        '(RolloutActor pid=22)   File "/x/vllm/v1/engine/core.py", line 1, in generate',
        "(PolicyActor pid=11)     exp_avg_sq_sqrt = torch._foreach_sqrt(x)",
        "(RolloutActor pid=22)     return self.step()",
        f"(PolicyActor pid=11) {MESSAGE}",
    ]
    assert failure_in("\n".join(log)).activity is Activity.OPTIMIZER


def test_a_traceback_that_the_program_survived_is_ignored() -> None:
    survived = '  File "/x/torch/optim/adamw.py", line 1, in step\n    self._init_group()\nValueError: no\n'
    assert failure_in(survived + "step 1 reward 0.5\n" * 2_000 + MESSAGE).activity is None


def test_the_engines_report_of_its_sleep_is_kept() -> None:
    engine = evidence_of("INFO [gpu_worker.py:115] Sleep mode freed 0.00 GiB memory, 63.15 GiB memory is still in use.")
    assert (engine.engine.asleep, engine.engine.freed_bytes) == (True, 0)
    assert engine.engine.still_in_use_bytes == round(63.15 * GIB)


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
