"""Failures are found in any log, regardless of the surrounding text."""

from __future__ import annotations

import html
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.memory_failure import Activity, FailureKind
from rljob_memory.evidence import Failure
from rljob_memory.evidence.failure import DeviceMemory
from rljob_memory.evidence.lines import WordGroups
from rljob_memory.evidence.torch_message import parse_message
from rljob_memory.sizes import GIB, MIB, size_bytes
from tests.unit.memory.diagnosis.recorded import evidence_of, torch_message

MESSAGE = torch_message(18.91, total=178.35, free=3.74, process=174.61, allocated=150, cached=19.68)
FRAME = '  File "/env/site-packages/torch/optim/adamw.py", line 606, in _multi_tensor_adamw'
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


def test_a_file_without_line_ends_is_read_in_pieces() -> None:
    failure = failure_in(b"x" * (3 << 20) + MESSAGE.encode() + b"y" * (1 << 20))
    assert failure.device is not None
    assert failure.device.requested_bytes == round(18.91 * GIB)


# --- lines that repeat are read once, which must hide nothing ---


def test_a_number_that_counts_is_seen_after_many_other_ones() -> None:
    failure = failure_in("worker-3 exited with code 1\n" * 200 + "worker-3 exited with code 137\n")
    assert failure.kind is FailureKind.KILLED


def test_a_traceback_that_repeats_keeps_its_frames() -> None:
    frames = f"Traceback (most recent call last):\n{FRAME}\n    func(\n"
    log = f"{frames}ValueError: no\n" * 100 + frames + MESSAGE
    assert failure_in(log).activity is Activity.OPTIMIZER


def test_every_retry_is_seen() -> None:
    log = f"step 7\n{MESSAGE}\nretrying with a smaller batch\n" + "step\n" * 20
    assert evidence_of(log * 100).failure is None


def test_memory_that_grows_is_seen_in_lines_that_repeat() -> None:
    log = "".join(f"Error while loading model; gpu memory allocated {step}.5 GiB\n" for step in range(20, 70))
    [series] = evidence_of(log.replace("Error while ", "") * 3).series
    assert len(series.samples) == 150


def test_words_are_found_next_to_other_numbers_and_in_the_first_group() -> None:
    groups = WordGroups(["killed", "1455"], ["mem", "step"])
    lines = [b"step 1", b"", b"step 2 was KILLED", b"os error 1455, step 3", b"os error 1454", b"mem1ory"]
    assert groups.of(lines) == [1, None, 0, 0, None, 1]
    assert groups.of([line.replace(b"1", b"7") for line in lines]) == [1, None, 0, 1, None, 1]
    assert groups.of([]) == []


def test_a_message_far_into_an_endless_line_is_found() -> None:
    words = b"gpu memory killed out of memory? " * 100_000
    failure = failure_in(words + MESSAGE.encode() + words)
    assert failure.device is not None


# --- a failure inside of JSON, HTML, escapes, binary data and other encodings ---

TRACEBACK = f"Traceback (most recent call last):\n{FRAME}\n    func(\n{MESSAGE}"


@pytest.mark.parametrize(
    "log",
    [
        json.dumps({"time": "2026-03-04T10:11:12Z", "level": "ERROR", "message": TRACEBACK}),
        json.dumps({"tokens": list(range(20_000)), "error": TRACEBACK, "ids": list(range(20_000))}),
        repr(TRACEBACK),
        f"<pre>{html.escape(TRACEBACK)}</pre>",
        TRACEBACK.replace("\n", "\r"),
        TRACEBACK.encode("utf-16"),
        TRACEBACK.encode("utf-16-le"),
        TRACEBACK.encode("utf-16-be"),
        b"\x00\x93\xfe OOM \xe2\x80" * 900 + b"\n" + TRACEBACK.encode() + b"\n" + bytes(range(128, 256)) * 90,
    ],
    ids=["JSON", "long JSON", "repr", "HTML", "CR", "UTF-16", "UTF-16 LE", "UTF-16 BE", "binary"],
)
def test_a_failure_is_read_from_any_form_of_text(log: str | bytes) -> None:
    evidence = evidence_of(log)
    assert evidence.failure is not None
    assert (evidence.failure.activity, evidence.failures) == (Activity.OPTIMIZER, 1)
    assert evidence.failure.device == failure_in(MESSAGE).device


def test_binary_data_is_no_report() -> None:
    assert evidence_of(random.Random(0).randbytes(1 << 20)).failure is None


# --- torch's message in numbers ---

SIZES = st.one_of(
    st.integers(0, 1023).map(lambda count: f"{count} bytes"),
    st.tuples(st.decimals(1, 1023, places=2), st.sampled_from(["KiB", "MiB", "GiB"])).map(lambda s: f"{s[0]} {s[1]}"),
)
OPTIONAL_SIZES = st.none() | SIZES.filter(lambda size: size != "0 bytes")
HINT = " If reserved but unallocated memory is large try setting "
HINTS = ["", f"{HINT}max_split_size_mb to avoid fragmentation.", f"{HINT}PYTORCH_ALLOC_CONF=expandable_segments:True."]


@st.composite
def messages(draw: st.DrawFn) -> tuple[str, dict[str, str | None]]:
    """A message in the format of torch 2.2 to 2.15, and its sizes by name."""
    sizes: dict[str, str | None] = {name: draw(SIZES) for name in ("requested", "total", "free", "allocated", "cached")}
    sizes |= {name: draw(OPTIONAL_SIZES) for name in ("process", "allowed", "private_pool")}
    others = draw(st.lists(st.tuples(st.integers(1, 10**7), SIZES), max_size=4)) if sizes["process"] else []
    processes = [f"Process {pid} has {used} memory in use. " for pid, used in others]
    if sizes["process"]:
        own = f"Including non-PyTorch memory, this process has {sizes['process']} memory in use. "
        processes.insert(draw(st.integers(0, len(others))), own)
    allowed = f"{sizes['allowed']} allowed; " if sizes["allowed"] else ""
    pools = f"with {sizes['private_pool']} allocated in private pools (e.g., CUDA Graphs), "
    text = (
        f"{draw(st.sampled_from(['CUDA', 'HIP']))} out of memory. Tried to allocate {sizes['requested']}. "
        f"GPU {draw(st.integers(0, 15))} has a total capacity of {sizes['total']} of which {sizes['free']} is free. "
        f"{''.join(processes)}{allowed}Of the allocated memory {sizes['allocated']} is allocated by PyTorch, "
        f"{pools if sizes['private_pool'] else ''}and {sizes['cached']} is reserved by PyTorch but unallocated."
    )
    return text + draw(st.sampled_from(HINTS)), sizes


def read(text: str) -> DeviceMemory:
    device = parse_message([text])
    assert device is not None
    return device


@given(messages(), st.integers(20, 120))
def test_every_number_of_a_message_is_read_back(message: tuple[str, dict[str, str | None]], width: int) -> None:
    text, sizes = message
    device = read(f"torch.OutOfMemoryError: {text}")
    assert {name: getattr(device, f"{name}_bytes") for name in sizes} == {
        name: size_bytes(size) if size else None for name, size in sizes.items()
    }
    assert read(re.sub(rf"(.{{{width}}}\S*) ", r"\1 \n", text)) == device, "also broken over lines"


def test_the_wording_of_torch_1_is_read() -> None:
    device = read(
        "CUDA out of memory. Tried to allocate 240.00 MiB (GPU 1; 14.76 GiB total capacity; 13.54 GiB already "
        "allocated; 73.75 MiB free; 13.63 GiB reserved in total by PyTorch)"
    )
    assert (device.gpu, device.requested_bytes, device.free_bytes) == (1, 240 * MIB, round(73.75 * MIB))
    assert device.cached_bytes == pytest.approx(0.09 * GIB, abs=MIB)


def test_in_a_pod_the_own_process_is_found_by_its_size_not_its_pid() -> None:
    device = read(
        "CUDA out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 14.74 GiB of which 42.19 MiB "
        "is free. Process 21219 has 284.00 MiB memory in use. Process 21222 has 3.40 GiB memory in use. Process 21216 "
        "has 10.77 GiB memory in use. Of the allocated memory 10.59 GiB is allocated by PyTorch, and 42.18 MiB is "
        "reserved by PyTorch but unallocated."
    )
    assert device.process_bytes == round(10.77 * GIB)
    assert [process.pid for process in device.others] == [21219, 21222]


def test_an_impossible_number_counts_as_unknown() -> None:
    device = read(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is "
        "free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the allocated "
        "memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    )
    assert device.process_bytes is None
    assert device.foreign_bytes == pytest.approx(7.11 * GIB, rel=0.01)


def test_a_truncated_message_still_gives_the_request() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has a total capa"
    device = parse_message([text])
    assert device is not None
    assert (device.requested_bytes, device.total_bytes) == (130 * MIB, None)


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    parse_message([text])
    parse_message([f"CUDA out of memory. Tried to allocate {text}"])
    parse_message(text.split())


@pytest.mark.parametrize(
    ("text", "size"),
    [("16G", 16 * GIB), ("1,024 MiB", GIB), ("1.2.3 GB", None), ("12 ZiB", None), ("9" * 15 + " GiB", None)],
)
def test_a_size_of_another_form_has_no_bytes(text: str, size: int | None) -> None:
    assert size_bytes(text) == size
