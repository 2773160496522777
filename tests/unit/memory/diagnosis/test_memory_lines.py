"""Memory figures are read from the lines of many trainers, and their growth is a leak."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence.collected import CollectedEvidence, EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.evidence.memory_lines import memory_figures
from rljob_memory.sizes import GIB, MIB

VERL = "step:{step} - actor/loss:0.1 - actor/perf/max_memory_allocated_gb:{a} - actor/perf/max_memory_reserved_gb:{r}"
VERL_DEBUG = (
    "After update_actor, memory allocated (GB): {a}, memory reserved (GB): {r}, device memory used/total (GB): 4/80"
)
SLIME = "[Rank 0] Memory-Usage after_train: {{'gpu': '0', 'allocated_GB': {a}, 'reserved_GB': {r}, 'free_GB': 12.1}}"
NEMO_RL = "GPU Memory after optimizer offload: {a}GB allocated, {r}GB reserved"
FAST_LLM = "Memory allocated {a} GiB | max allocated 70.00 GiB | reserved {r} GiB | max reserved 71.00 GiB"
DEEPSPEED = (
    "[INFO] [utils.py:782:see_memory_usage] MA {a} GB         Max_MA 70.1 GB         CA {r} GB         Max_CA 71 GB"
)
AXOLOTL = (
    "{{'loss': '0.1', 'memory/max_allocated (GiB)': '{a}', 'memory/device_reserved (GiB)': '{r}', 'step': {step}}}"
)
PLAIN = "iteration {step}: gpu alloc={a}GB reserved={r}GB"
FORMS = [VERL, VERL_DEBUG, SLIME, NEMO_RL, FAST_LLM, DEEPSPEED, AXOLOTL, PLAIN]
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.10 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the "
    "allocated memory 76.00 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)


def evidence_of(text: str) -> CollectedEvidence:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(text.encode()))
    return builder.build()


@pytest.mark.parametrize("form", FORMS)
def test_the_figures_of_a_trainer_are_read(form: str) -> None:
    figures = memory_figures(form.format(step=4, a=3.75, r=40.25))
    assert figures is not None
    assert figures.sample.allocated_bytes == round(3.75 * GIB)
    # axolotl prints the peak of tensors beside what is reserved now: the two do not belong together.
    assert figures.sample.reserved_bytes == (0 if form == AXOLOTL else round(40.25 * GIB))


def test_megatrons_unit_stands_before_its_figures() -> None:
    line = "[Rank 0] (after 10 iterations) memory (MB) | allocated: 2048.0 | max allocated: 9000.0 | reserved: 4096.0"
    figures = memory_figures(line)
    assert figures is not None
    assert (figures.sample.allocated_bytes, figures.sample.reserved_bytes) == (2048 * MIB, 4096 * MIB)
    assert figures.sample.step == 10


@pytest.mark.parametrize(
    "line",
    [
        "allocated 3 GPUs to the job",
        "reserved: 12.3 GiB",
        "allocating KV cache",
        "gpu_memory_utilization: 0.9, num_gpu_blocks allocated: 812",
    ],
)
def test_other_lines_have_no_figures(line: str) -> None:
    assert memory_figures(line) is None


@pytest.mark.parametrize("form", FORMS)
def test_a_steady_climb_of_allocated_memory_is_a_leak(form: str) -> None:
    log = [form.format(step=step, a=20 + 4.5 * step, r=22 + 4.5 * step) for step in range(1, 13)]
    best = diagnose(evidence_of("\n".join([*log, OUT_OF_MEMORY])))[0]
    assert best.failure_class is FailureClass.RETAINED_GRAPH
    assert best.confidence > 0.8


def test_points_of_a_step_are_series_of_their_own() -> None:
    log = [
        f"{place} memory allocated (GB): {gib}, memory reserved (GB): 60.0"
        for _ in range(10)
        for place, gib in (("Before update,", 10.0), ("After update,", 50.0))
    ]
    evidence = evidence_of("\n".join([*log, OUT_OF_MEMORY]))
    assert [len(series.samples) for series in evidence.series] == [10, 10]
    assert FailureClass.RETAINED_GRAPH not in {found.failure_class for found in diagnose(evidence)}
