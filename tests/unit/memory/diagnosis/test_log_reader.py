"""Failures are found in any log, regardless of the surrounding text."""

from __future__ import annotations

import random
import tracemalloc
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence import CollectedEvidence, FailureKind
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.sizes import GIB, MIB
from tests.unit.memory.diagnosis.recorded import recorded_texts

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {requested} GiB. GPU 0 has a total capacity of "
    "178.35 GiB of which 3.74 GiB is free. Including non-PyTorch memory, this process has 174.61 GiB memory in use. Of "
    "the allocated memory 150.00 GiB is allocated by PyTorch, and 19.68 GiB is reserved by PyTorch but unallocated."
)
CONSEQUENCES = [
    "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600 ms",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 1167 closing signal SIGTERM",
]


def evidence_of(text: str | bytes) -> CollectedEvidence:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text))
    return builder.build()


@given(st.binary(max_size=4_000))
def test_any_bytes_are_read_without_an_error(noise: bytes) -> None:
    diagnose(evidence_of(noise))


@given(
    st.lists(st.sampled_from([path.read_text(encoding="utf-8") for path in recorded_texts()]), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_torn_and_shuffled_failures_are_read_without_an_error(texts: list[str], chance: random.Random) -> None:
    lines = [line[: chance.randint(0, len(line) + 1)] for text in texts for line in text.splitlines()]
    chance.shuffle(lines)
    for diagnosis in diagnose(evidence_of("\n".join(lines))):
        assert 0 < diagnosis.confidence <= 1


@pytest.mark.parametrize("path", recorded_texts(), ids=lambda path: path.stem)
def test_garbage_around_a_failure_does_not_change_its_diagnosis(path: Path) -> None:
    text = path.read_bytes()
    chance = random.Random(3)
    garbage = b"".join(bytes(chance.choices(range(128, 256), k=200)) + b"\n" for _ in range(40))
    progress = "Training: 37%|███▋      | 37/100 [00:12<00:20, 3.1it/s]\r\n".encode() * 50
    expected = [diagnosis.as_dict() for diagnosis in diagnose(evidence_of(text))]
    assert [
        d.as_dict() for d in diagnose(evidence_of(garbage + progress + text + b"\n" + progress + garbage))
    ] == expected


@given(st.permutations(CONSEQUENCES), st.integers(0, len(CONSEQUENCES)))
def test_consequences_are_ignored_at_any_position(consequences: list[str], before: int) -> None:
    failure = OUT_OF_MEMORY.format(requested="18.91")
    alone = evidence_of(failure)
    among = evidence_of("\n".join([*consequences[:before], failure, *consequences[before:]]))
    assert among.failure == alone.failure
    assert among.failures == 1
    assert sum(among.secondary.values()) == len(CONSEQUENCES)


def test_consequences_alone_are_no_failure_of_memory() -> None:
    assert diagnose(evidence_of("\n".join(CONSEQUENCES))) == []


def test_with_timestamps_the_earliest_rank_counts() -> None:
    late = f"2026-05-01 10:00:09,120 [rank1]: {OUT_OF_MEMORY.format(requested='2.00')}"
    early = f"2026-05-01 10:00:07,800 [rank0]: {OUT_OF_MEMORY.format(requested='18.91')}"
    failure = evidence_of(f"{late}\n{early}\n").failure
    assert failure is not None
    assert failure.rank == 0


def test_without_timestamps_the_first_in_the_log_counts() -> None:
    first, second = (f"[rank{rank}]: {OUT_OF_MEMORY.format(requested='2.00')}" for rank in (5, 0))
    failure = evidence_of(f"{first}\n{second}\n").failure
    assert failure is not None
    assert failure.rank == 5


def test_interleaved_tracebacks_are_separated_by_process() -> None:
    policy = [
        '  File "/x/torch/optim/adamw.py", line 606, in _multi_tensor_adamw',
        "    exp_avg_sq_sqrt = torch._foreach_sqrt(x)",
    ]
    engine = ['  File "/x/vllm/v1/engine/core.py", line 1, in generate', "    return self.step()"]
    lines = [
        f"(PolicyActor pid=11) {policy[0]}",
        f"(RolloutActor pid=22) {engine[0]}",
        f"(PolicyActor pid=11) {policy[1]}",
        f"(RolloutActor pid=22) {engine[1]}",
        f"(PolicyActor pid=11) {OUT_OF_MEMORY.format(requested='60.00')}",
    ]
    failure = evidence_of("\n".join(lines)).failure
    assert failure is not None
    assert failure.activity is not None
    assert failure.activity.name == "OPTIMIZER"


def test_a_message_wrapped_within_a_word_is_read_whole() -> None:
    head, tail = OUT_OF_MEMORY.format(requested="18.91")[:190], OUT_OF_MEMORY.format(requested="18.91")[190:]
    failure = evidence_of(f"[rank4]: {head}\n{tail}\n").failure
    assert failure is not None
    assert failure.rank == 4
    assert failure.device is not None
    assert failure.device.allocated_bytes == 150 * GIB


def test_a_traceback_that_the_program_survived_is_ignored() -> None:
    survived = '  File "/x/torch/optim/adamw.py", line 1, in step\n    self._init_group()\nValueError: no\n'
    failure = evidence_of(survived + "step 1 reward 0.5\n" * 2_000 + OUT_OF_MEMORY.format(requested="2.00")).failure
    assert failure is not None
    assert failure.activity is None


def test_colours_do_not_hide_a_failure() -> None:
    text = (
        "\x1b[36m(EngineCore pid=1)\x1b[0m \x1b[31mERROR\x1b[0m RuntimeError: "
        "CUDA \x1b[1mError: out of memory at /csrc/cumem_allocator.cpp:139\x1b[0m"
    )
    failure = evidence_of(text).failure
    assert failure is not None
    assert failure.kind is FailureKind.ENGINE_WAKE


def test_a_warning_that_torch_recovers_from_is_no_failure() -> None:
    warning = "expandable_segments: memory mapping failed with OOM on device 0 while trying to map 20971520 bytes"
    assert evidence_of(warning).failure is None


def test_the_engines_report_of_its_sleep_is_kept() -> None:
    engine = evidence_of(
        "INFO [gpu_worker.py:115] Sleep mode freed 0.00 GiB memory, 63.15 GiB memory is still in use."
    ).engine
    assert (engine.asleep, engine.freed_bytes, engine.still_in_use_bytes) == (True, 0, round(63.15 * GIB))


@pytest.mark.parametrize(
    "line",
    [
        "[WorkerDict] After update_actor, memory allocated (GB): 3.75, memory reserved (GB): 40.25, device used: 45",
        "[INFO] [utils.py:782:see_memory_usage] MA 3.75 GB         Max_MA 46.18 GB         CA 40.25 GB",
        "step 4 allocated: 3.75 GiB, reserved: 40.25 GiB",
    ],
)
def test_memory_that_trainers_log_becomes_a_series(line: str) -> None:
    (series,) = evidence_of(line).series
    assert (series.samples[0].allocated_bytes, series.samples[0].reserved_bytes) == (3.75 * GIB, 40.25 * GIB)


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
        text = self._block if self._blocks else OUT_OF_MEMORY.format(requested="18.91").encode()
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
    text = b"x" * (3 << 20) + OUT_OF_MEMORY.format(requested="18.91").encode() + b"y" * (1 << 20)
    failure = evidence_of(text).failure
    assert failure is not None
    assert failure.device is not None
    assert failure.device.requested_bytes == round(18.91 * GIB)
