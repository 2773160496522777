"""Memory figures under any name are read as series; a climb is a leak, and a healthy run is left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from io import BytesIO

import pytest

from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence.collected import CollectedEvidence, EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.evidence.named_figures import Measure, named_figure
from rljob_memory.sizes import GIB, MIB

TORCHTITAN = (
    "[titan] step: {step}  loss:  4.1  grad_norm:  1.2  memory: {gib:.2f}GiB({percent:.2f}%)  tps: 7,123  mfu: 3%"
)
PRIME_RL = (
    "Step {step} | Time: 3.21s | Loss: 0.1 | Grad. Norm: 0.1 | LR: 1.0e-06 | MFU: 31.2% | Peak Mem. {gib:.1f} GiB"
)
DETR = "Epoch: [0]  [{step:4d}/5000]  eta: 0:12:11  lr: 0.0001  loss: 1.23 (1.44)  data: 0.0004  max mem: {mib}"
MMENGINE = (
    "10/01 12:00:00 - mmengine - INFO - Epoch(train) [1][{step:3d}/900] lr: 1e-02 time: 0.2 memory: {mib} loss: 1.1"
)
SWIFT = "{{'loss': 0.2, 'grad_norm': 1.2, 'memory(GiB)': {gib:.2f}, 'global_step/max_steps': '{step}/300'}}"
TORCHTUNE = (
    "Step {step} | loss:1.2 lr:1e-05 tokens_per_second_per_gpu:812.1 peak_memory_active:{gib} peak_memory_alloc:{gib}"
)
JSON = '{{"step": {step}, "loss": 1.2, "gpu_mem_gb": {gib:.1f}}}'
VRAM = "step {step} VRAM {gib:.1f}/80 GB"
PLAIN = "step {step} gpu mem {gib:.1f} GB"
WANDB = "wandb: step {step} train/gpu_memory_gb {gib:.2f} reward 0.4"
OWN_WORDS = "[epoch 3] iter {step}, train loss 1.2 | gpu memory (MB) {mib}"
NUMBER_FIRST = "iteration {step}: loss 0.31, using {gib:.1f} GB of GPU memory"
NVIDIA_SMI = "step {step}: GPU memory used: {mib}MiB / 81559MiB"
LIGHTNING = "Epoch 7: global_step={step}, train_loss=1.20, cuda_mem={gib:.1f}G"
BYTES = "iter {step}: cuda_memory_used={size}"
FORMS = {
    **{"torchtitan": TORCHTITAN, "prime-rl": PRIME_RL, "DETR": DETR, "mmengine": MMENGINE, "ms-swift": SWIFT},
    **{"torchtune": TORCHTUNE, "JSON": JSON, "VRAM": VRAM, "plain": PLAIN, "wandb": WANDB, "own words": OWN_WORDS},
    **{"number first": NUMBER_FIRST, "nvidia-smi": NVIDIA_SMI, "Lightning": LIGHTNING, "bytes": BYTES},
}
OUT_OF_MEMORY = (
    '  File "/app/train.py", line 9, in step\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.10 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the "
    "allocated memory 76.00 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)


def log_of(form: str, sizes: list[float]) -> list[str]:
    """A line for each size in GiB."""
    return [
        form.format(step=step, gib=gib, mib=round(gib * 1024), percent=gib / 0.8, size=round(gib * GIB))
        for step, gib in enumerate(sizes, 1)
    ]


def evidence_of(lines: list[str]) -> CollectedEvidence:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO("\n".join(lines).encode()))
    return builder.build()


def diagnoses_of(*lines: str) -> list[Diagnosis]:
    return diagnose(evidence_of(list(lines)))


@pytest.mark.parametrize("form", FORMS)
def test_the_figure_is_read(form: str) -> None:
    [line] = log_of(FORMS[form], [45.5])
    figure = named_figure(line)
    assert figure is not None
    assert figure.size_bytes == pytest.approx(45.5 * GIB, rel=1e-3)
    assert figure.measure in (Measure.GPU, Measure.TENSORS)
    assert figure.is_peak == (form in ("prime-rl", "DETR", "torchtune"))


@pytest.mark.parametrize("form", FORMS)
def test_the_lines_of_a_run_are_one_series(form: str) -> None:
    [series] = evidence_of(log_of(FORMS[form], [45.5] * 12)).series
    if form not in ("mmengine", "ms-swift", "DETR"):  # Their steps have no name that other programs use.
        assert [sample.step for sample in series.samples] == list(range(1, 13))
    assert len(series.samples) == 12


@pytest.mark.parametrize("form", FORMS)
def test_a_climb_is_a_leak_and_outweighs_the_last_straw(form: str) -> None:
    best, *others = diagnoses_of(*log_of(FORMS[form], [12 + 3.7 * n for n in range(17)]), OUT_OF_MEMORY)
    assert best.failure_class is FailureClass.RETAINED_GRAPH
    assert best.confidence >= 0.65
    assert {other.failure_class for other in others} >= {FailureClass.ACTIVATION_SPIKE}


@pytest.mark.parametrize("form", ["JSON", "plain", "VRAM", "torchtitan"])
def test_a_climb_without_a_failure_is_reported(form: str) -> None:
    [found] = diagnoses_of(*log_of(FORMS[form], [12 + 3.7 * n for n in range(14)]))
    assert (found.failure_class, found.confidence) == (FailureClass.RETAINED_GRAPH, 0.5)


def flat(chance: random.Random) -> list[float]:
    return [round(50 + chance.uniform(-3, 3), 1) for _ in range(chance.randint(3, 40))]


def with_a_warm_up(chance: random.Random) -> list[float]:
    return [8.0, 21.5, 44.0, 52.1, *[round(54 + chance.uniform(-1, 1), 1) for _ in range(30)]]


def running_maximum(chance: random.Random) -> list[float]:
    highest, sizes = 20.0, []
    for _ in range(chance.randint(8, 60)):
        highest = max(highest, round(chance.gauss(45, 8), 1))
        sizes.append(highest)
    return sizes


def sawtooth(chance: random.Random) -> list[float]:
    return [10.0 + 5 * (n % 9) for n in range(chance.randint(10, 40))]


HEALTHY: list[Callable[[random.Random], list[float]]] = [flat, with_a_warm_up, running_maximum, sawtooth]


@pytest.mark.parametrize("run", HEALTHY)
@pytest.mark.parametrize("form", FORMS)
def test_a_healthy_run_is_left_alone(form: str, run: Callable[[random.Random], list[float]]) -> None:
    """Neither without a failure, nor if a longer sequence runs out of memory at its end."""
    for seed in range(2):
        log = log_of(FORMS[form], run(random.Random(seed)))
        assert diagnoses_of(*log) == []
        found = diagnoses_of(*log, OUT_OF_MEMORY)
        assert found[0].failure_class is FailureClass.ACTIVATION_SPIKE
        assert FailureClass.RETAINED_GRAPH not in {each.failure_class for each in found}


@pytest.mark.parametrize("run", HEALTHY)
def test_hardly_any_healthy_run_is_a_leak(run: Callable[[random.Random], list[float]]) -> None:
    wrong = 0
    for seed in range(150):
        found = diagnoses_of(*log_of(PLAIN, run(random.Random(seed))), OUT_OF_MEMORY)
        wrong += FailureClass.RETAINED_GRAPH in {each.failure_class for each in found}
    assert wrong <= 1


@pytest.mark.parametrize("name", ["cpu mem", "rss", "RAM", "host memory", "system RAM used", "process memory"])
def test_host_memory_is_not_the_gpus(name: str) -> None:
    log = [f"step {step} {name}: {40 + 5 * step:.1f} GB" for step in range(16)]
    assert diagnoses_of(*log) == []
    assert FailureClass.RETAINED_GRAPH not in {each.failure_class for each in diagnoses_of(*log, OUT_OF_MEMORY)}
    [killed] = diagnoses_of(*log, "torch.multiprocessing: process 0 terminated with signal SIGKILL")
    assert killed.failure_class is FailureClass.HOST_MEMORY
    assert "grew from 40.00 GiB to 115.00 GiB" in killed.message


@pytest.mark.parametrize(
    "form",
    [
        "step {n} memory-mapped dataset {n}.2 GB read",
        "step {n} memory: {n}000 reward 0.3",
        "episode {n}, memory size: {n}000, reward 0.3",
        "step {n} allocated blocks: {n}000",
        "step {n} num_alloc_retries: {n}00",
        "step {n} cuda:0: {n}GB copied",
        "step {n} Memory transfers {n} GB total",
        "step {n} mem bw {n}0 GB/s",
        "step {n} disk used 12.{n} GB of 100 GB",
        "step {n} memory limit: {n} GB",
        "Decode batch. #running-req: {n}, #token: {n}000, token usage: 0.{n}, avail mem=30.{n} GB",
        "step {n} object store memory: {n} GB used",
    ],
)
def test_numbers_that_grow_in_a_healthy_run_are_no_memory(form: str) -> None:
    lines = [form.format(n=n) for n in range(10, 40)]
    assert diagnoses_of(*lines) == []
    assert diagnoses_of(*lines, OUT_OF_MEMORY)[0].failure_class is FailureClass.ACTIVATION_SPIKE


@pytest.mark.parametrize(
    "line",
    [
        "GPU KV cache usage: 45.2%, Prefix cache hit rate: 12.0%",
        "Available memory: 12.1 GB",
        "gpu_memory_utilization=0.9",
        "mem_fraction_static=0.8",
        "Memory: 45%",
        "memory_efficient_attention: 1",
        "cpu cores: 16, total memory: 503 GB",
        "remember 45.2 GB of members",
        "memory limit 80 GB",
        "avail mem=12.34 GB",
        "train_mem_gpu_alloc_delta = 5000MB",
        "the framework memorizes 3 examples",
    ],
)
def test_limits_shares_and_prose_are_no_figures(line: str) -> None:
    assert named_figure(line) is None


def test_the_unit_in_a_name_counts() -> None:
    for line, size in (
        ("mem_mb=45212", 45_212 * MIB),
        ("mem/gpu_gib 45.5", 45.5 * GIB),
        ("gpuMemGB: 45.5", 45.5 * GIB),
    ):
        figure = named_figure(line)
        assert figure is not None
        assert figure.size_bytes == size


RESERVED = "step {step}: memory allocated: 30.{step} GiB, reserved: {gib:.1f} GiB"


def test_reserved_memory_that_climbs_beside_flat_tensors_is_fragmentation() -> None:
    log = [RESERVED.format(step=step % 3, gib=36 + 3.1 * step) for step in range(13)]
    without_numbers = "RuntimeError: CUDA out of memory. Tried to allocate 1.10 GiB"
    for message in (
        without_numbers,
        OUT_OF_MEMORY.replace("76.00 GiB is allocated", "70.00 GiB is allocated").replace(
            "1.10 GiB is r", "7.10 GiB is r"
        ),
    ):
        best = diagnoses_of(*log, message)[0]
        assert best.failure_class is FailureClass.FRAGMENTATION
    assert diagnoses_of(*log, "CUDA Error: out of memory at /cumem_allocator.cpp:119")[0].failure_class is (
        FailureClass.ALLOCATOR_CACHE
    )


def test_memory_that_grows_with_the_sequences_is_no_leak() -> None:
    form = "step:{step} - response_length/mean:{length} - perf/max_memory_allocated_gb:{gib:.2f}"
    lines = [form.format(step=step, length=500 + 100 * step, gib=12 + 3.7 * step) for step in range(17)]
    assert diagnoses_of(*lines) == []
    assert diagnoses_of(*lines, OUT_OF_MEMORY)[0].failure_class is FailureClass.ACTIVATION_SPIKE
    steady = [form.format(step=step, length=500 + step % 3, gib=12 + 3.7 * step) for step in range(17)]
    assert diagnoses_of(*steady, OUT_OF_MEMORY)[0].failure_class is FailureClass.RETAINED_GRAPH


def test_a_small_growth_of_a_gpu_that_filled_up_is_no_leak() -> None:
    lines = [f"step {step} mem {30 + 0.02 * step:.2f} GB" for step in range(100)]
    [best] = diagnoses_of(*lines, OUT_OF_MEMORY)
    assert (best.failure_class, best.confidence) == (FailureClass.ACTIVATION_SPIKE, 0.65)


def test_the_states_of_a_progress_bar_in_one_line_are_a_series() -> None:
    bars = [f" 12%|█▏   | {step}/300 [00:12<10:00,  2.1s/it, mem={12 + 3.7 * step:.1f}G]" for step in range(17)]
    [series] = evidence_of(["\r".join(bars)]).series
    assert len(series.samples) == 17


def test_tables_and_queries_of_nvidia_smi_are_series_by_gpu() -> None:
    head = "|   {gpu}  NVIDIA H100 80GB HBM3          On  |   00000000:18:00.0 Off |                    0 |"
    row = "| N/A   41C    P0            120W /  700W |   {mib}MiB /  81559MiB |     87%      Default |"
    table = [line.format(gpu=gpu, mib=20_000 + gpu) for _ in range(3) for gpu in (0, 1) for line in (head, row)]
    query = [f"2026/01/01 10:0{n}:00.000, {gpu}, {20_000 + gpu} MiB, 81559 MiB" for n in range(3) for gpu in (0, 1)]
    for log in (table, query):
        series = evidence_of(log).series
        assert [(each.name, len(each.samples)) for each in series] == [("nvidia-smi GPU 0", 3), ("nvidia-smi GPU 1", 3)]


def test_memory_that_grows_while_a_model_is_made_is_no_leak() -> None:
    log = [f"Loading layer {layer} gpu memory: {2 + layer}.1 GB" for layer in range(24)]
    assert diagnoses_of(*log) == []
    assert diagnoses_of(*log, OUT_OF_MEMORY)[0].failure_class is FailureClass.ACTIVATION_SPIKE


@pytest.mark.parametrize("form", ["plain", "JSON", "own words", "bytes"])
@pytest.mark.parametrize("count", [6, 7, 9])
def test_a_large_growth_at_each_of_a_few_steps_is_a_leak(form: str, count: int) -> None:
    sizes = [20 + 48 / count * n for n in range(count)]
    best = diagnoses_of(*log_of(FORMS[form], sizes), OUT_OF_MEMORY)[0]
    assert (best.failure_class, best.confidence >= 0.6) == (FailureClass.RETAINED_GRAPH, True)
    for healthy in (sizes[:4], sorted(sizes, reverse=True), [sizes[0], *sizes[-1:] * (count - 1)]):
        best = diagnoses_of(*log_of(FORMS[form], healthy), OUT_OF_MEMORY)[0]
        assert best.failure_class is FailureClass.ACTIVATION_SPIKE
