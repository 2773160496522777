"""Memory figures in the lines of many trainers, and under any name: a climb is a leak, a healthy run is left alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rljob_memory.diagnosis import FailureClass
from rljob_memory.evidence.figures import Figure, Measure, figures_of
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB
from tests.unit.memory.diagnosis.recorded import diagnoses_of, evidence_of, torch_message

OUT_OF_MEMORY = '  File "/app/train.py", line 9, in step\n    loss.backward()\n' + torch_message(
    3.1, total=79.1, free=1.02, process=78.08, allocated=76, cached=1.1
)
LEAK, SPIKE = FailureClass.RETAINED_GRAPH, FailureClass.ACTIVATION_SPIKE


def classes_of(*lines: str) -> list[FailureClass]:
    return [found.failure_class for found in diagnoses_of(*lines)]


def figure_in(line: str) -> Figure | None:
    return next(iter(figures_of(line)), None)


def sample_in(line: str) -> MemorySample:
    [series] = evidence_of(line).series
    return series.samples[0]


# --- tensors and reserved memory, as trainers print them ---

AXOLOTL = (
    "{{'loss': '0.1', 'memory/max_allocated (GiB)': '{a}', 'memory/device_reserved (GiB)': '{r}', 'step': {step}}}"
)
PAIRS = [
    "step:{step} - actor/loss:0.1 - actor/perf/max_memory_allocated_gb:{a} - actor/perf/max_memory_reserved_gb:{r}",
    "After update_actor, memory allocated (GB): {a}, memory reserved (GB): {r}, device memory used/total (GB): 4/80",
    "[Rank 0] Memory-Usage after_train: {{'gpu': '0', 'allocated_GB': {a}, 'reserved_GB': {r}, 'free_GB': 12.1}}",
    "GPU Memory after optimizer offload: {a}GB allocated, {r}GB reserved",
    "Memory allocated {a} GiB | max allocated 70.00 GiB | reserved {r} GiB | max reserved 71.00 GiB",
    "[INFO] [utils.py:782:see_memory_usage] MA {a} GB         Max_MA 70.1 GB         CA {r} GB         Max_CA 71 GB",
    "iteration {step}: gpu alloc={a}GB reserved={r}GB",
    AXOLOTL,
]


@pytest.mark.parametrize("form", PAIRS)
def test_tensors_and_reserved_memory_are_read_and_a_climb_is_a_leak(form: str) -> None:
    sample = sample_in(form.format(step=4, a=3.75, r=40.25))
    assert sample.allocated_bytes == round(3.75 * GIB)
    # axolotl prints the peak of tensors beside what is reserved now: the two do not belong together.
    assert sample.reserved_bytes == (0 if form == AXOLOTL else round(40.25 * GIB))
    log = [form.format(step=step, a=20 + 4.5 * step, r=22 + 4.5 * step) for step in range(1, 13)]
    best = diagnoses_of(*log, OUT_OF_MEMORY)[0]
    assert (best.failure_class, best.confidence) == (LEAK, 0.6)


def test_megatrons_unit_stands_before_its_figures() -> None:
    line = "[Rank 0] (after 10 iterations) memory (MB) | allocated: 2048.0 | max allocated: 9000.0 | reserved: 4096.0"
    sample = sample_in(line)
    assert (sample.allocated_bytes, sample.reserved_bytes, sample.step) == (2048 * MIB, 4096 * MIB, 10)


def test_points_of_a_step_are_series_of_their_own() -> None:
    log = [
        f"{place} memory allocated (GB): {gib}, memory reserved (GB): 60.0"
        for _ in range(10)
        for place, gib in (("Before update,", 10.0), ("After update,", 50.0))
    ]
    assert [len(series.samples) for series in evidence_of("\n".join(log)).series] == [10, 10]
    assert LEAK not in classes_of(*log, OUT_OF_MEMORY)


def test_reserved_memory_that_climbs_beside_flat_tensors_is_a_cache() -> None:
    log = [f"step {n}: memory allocated: 30.{n % 3} GiB, reserved: {36 + 3.1 * n:.1f} GiB" for n in range(13)]
    with_numbers = torch_message(3.1, total=79.1, free=1.02, process=78.08, allocated=70, cached=7.1)
    for message in ("RuntimeError: CUDA out of memory. Tried to allocate 1.10 GiB", with_numbers):
        assert classes_of(*log, message)[0] is FailureClass.FRAGMENTATION
    wake = "CUDA Error: out of memory at /cumem_allocator.cpp:119"
    assert classes_of(*log, wake)[0] is FailureClass.ALLOCATOR_CACHE


# --- a figure of any name ---

PLAIN = "step {step} gpu mem {gib:.1f} GB"
FORMS = {
    "torchtitan": (
        "[titan] step: {step}  loss:  4.1  grad_norm:  1.2  memory: {gib:.2f}GiB({percent:.2f}%)  tps: 7,123  mfu: 3%"
    ),
    "prime-rl": "Step {step} | Time: 3.21s | Loss: 0.1 | Grad. Norm: 0.1 | MFU: 31.2% | Peak Mem. {gib:.1f} GiB",
    "DETR": "Epoch: [0]  [{step:4d}/5000]  eta: 0:12:11  lr: 0.0001  loss: 1.23 (1.44)  data: 0.0004  max mem: {mib}",
    "mmengine": "10/01 12:00:00 - mmengine - INFO - Epoch(train) [1][{step:3d}/900] lr: 1e-02 memory: {mib} loss: 1.1",
    "ms-swift": "{{'loss': 0.2, 'grad_norm': 1.2, 'memory(GiB)': {gib:.2f}, 'global_step/max_steps': '{step}/300'}}",
    "torchtune": "Step {step} | loss:1.2 lr:1e-05 peak_memory_active:{gib} peak_memory_alloc:{gib}",
    "JSON": '{{"step": {step}, "loss": 1.2, "gpu_mem_gb": {gib:.1f}}}',
    "VRAM": "step {step} VRAM {gib:.1f}/80 GB",
    "plain": PLAIN,
    "wandb": "wandb: step {step} train/gpu_memory_gb {gib:.2f} reward 0.4",
    "own words": "[epoch 3] iter {step}, train loss 1.2 | gpu memory (MB) {mib}",
    "number first": "iteration {step}: loss 0.31, using {gib:.1f} GB of GPU memory",
    "nvidia-smi": "step {step}: GPU memory used: {mib}MiB / 81559MiB",
    "Lightning": "Epoch 7: global_step={step}, train_loss=1.20, cuda_mem={gib:.1f}G",
    "bytes": "iter {step}: cuda_memory_used={size}",
}


def log_of(form: str, sizes: list[float]) -> list[str]:
    """A line for each size in GiB."""
    return [
        form.format(step=step, gib=gib, mib=round(gib * 1024), percent=gib / 0.8, size=round(gib * GIB))
        for step, gib in enumerate(sizes, 1)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_the_figure_is_read_and_its_lines_are_one_series(form: str) -> None:
    log = log_of(FORMS[form], [45.5] * 12)
    figure = figure_in(log[0])
    assert figure is not None
    assert figure.size_bytes == pytest.approx(45.5 * GIB, rel=1e-3)
    assert figure.measure in (Measure.GPU, Measure.TENSORS)
    assert figure.is_peak == (form in ("prime-rl", "DETR", "torchtune"))
    [series] = evidence_of("\n".join(log)).series
    if form not in ("mmengine", "ms-swift", "DETR"):  # Their steps have no name that other programs use.
        assert [sample.step for sample in series.samples] == list(range(1, 13))
    assert len(series.samples) == 12


@pytest.mark.parametrize("form", FORMS)
def test_a_climb_is_a_leak_and_outweighs_the_last_straw(form: str) -> None:
    best, *others = diagnoses_of(*log_of(FORMS[form], [12 + 3.7 * n for n in range(17)]), OUT_OF_MEMORY)
    assert (best.failure_class, best.confidence >= 0.45) == (LEAK, True)
    assert SPIKE in {other.failure_class for other in others}


@pytest.mark.parametrize("form", ["JSON", "plain", "VRAM", "torchtitan"])
def test_a_climb_without_a_failure_is_reported(form: str) -> None:
    [found] = diagnoses_of(*log_of(FORMS[form], [12 + 3.7 * n for n in range(14)]))
    assert (found.failure_class, found.confidence) == (LEAK, 0.3)


@pytest.mark.parametrize("form", ["plain", "JSON", "own words", "bytes"])
@pytest.mark.parametrize("count", [6, 9])
def test_a_large_growth_at_each_of_a_few_steps_is_a_leak(form: str, count: int) -> None:
    sizes = [20 + 48 / count * n for n in range(count)]
    best = diagnoses_of(*log_of(FORMS[form], sizes), OUT_OF_MEMORY)[0]
    assert (best.failure_class, best.confidence >= 0.45) == (LEAK, True)
    for healthy in (sizes[:4], sorted(sizes, reverse=True), [sizes[0], *sizes[-1:] * (count - 1)]):
        assert classes_of(*log_of(FORMS[form], healthy), OUT_OF_MEMORY)[0] is SPIKE


# --- healthy runs ---


def flat(chance: random.Random) -> list[float]:
    return [round(50 + chance.uniform(-3, 3), 1) for _ in range(chance.randint(3, 40))]


def with_a_warm_up(chance: random.Random) -> list[float]:
    return [8.0, 21.5, 44.0, 52.1, *[round(54 + chance.uniform(-1, 1), 1) for _ in range(30)]]


def running_maximum(chance: random.Random) -> list[float]:
    sizes = [round(chance.gauss(45, 8), 1) for _ in range(chance.randint(8, 60))]
    return [max(20.0, *sizes[: end + 1]) for end in range(len(sizes))]


def sawtooth(chance: random.Random) -> list[float]:
    return [10.0 + 5 * (n % 9) for n in range(chance.randint(10, 40))]


@pytest.mark.parametrize("run", [flat, with_a_warm_up, running_maximum, sawtooth])
def test_a_healthy_run_is_left_alone(run: Callable[[random.Random], list[float]]) -> None:
    """Neither without a failure, nor if a longer sequence runs out of memory at its end."""
    for form in FORMS.values():
        for seed in range(2):
            log = log_of(form, run(random.Random(seed)))
            assert diagnoses_of(*log) == []
            found = classes_of(*log, OUT_OF_MEMORY)
            assert found[0] is SPIKE
            assert LEAK not in found
    leaks = [LEAK in classes_of(*log_of(PLAIN, run(random.Random(seed))), OUT_OF_MEMORY) for seed in range(150)]
    assert sum(leaks) <= 1


@pytest.mark.parametrize("name", ["cpu mem", "rss", "RAM", "host memory", "system RAM used", "process memory"])
def test_host_memory_is_not_the_gpus(name: str) -> None:
    log = [f"step {step} {name}: {40 + 5 * step:.1f} GB" for step in range(16)]
    assert diagnoses_of(*log) == []
    assert LEAK not in classes_of(*log, OUT_OF_MEMORY)
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
        "Loading layer {n} gpu memory: {n}.1 GB",
    ],
)
def test_other_numbers_that_grow_are_no_leak(form: str) -> None:
    lines = [form.format(n=n) for n in range(10, 40)]
    assert diagnoses_of(*lines) == []
    assert classes_of(*lines, OUT_OF_MEMORY)[0] is SPIKE


@pytest.mark.parametrize(
    ("line", "size"), [("mem_mb=45212", 45_212 * MIB), ("mem/gpu_gib 45.5", 45.5 * GIB), ("gpuMemGB: 45.5", 45.5 * GIB)]
)
def test_the_unit_in_a_name_counts(line: str, size: float) -> None:
    figure = figure_in(line)
    assert figure is not None
    assert figure.size_bytes == size


def test_memory_that_grows_with_the_sequences_is_no_leak() -> None:
    form = "step:{step} - response_length/mean:{length} - perf/max_memory_allocated_gb:{gib:.2f}"
    lines = [form.format(step=step, length=500 + 100 * step, gib=12 + 3.7 * step) for step in range(17)]
    assert diagnoses_of(*lines) == []
    assert classes_of(*lines, OUT_OF_MEMORY)[0] is SPIKE
    steady = [form.format(step=step, length=500 + step % 3, gib=12 + 3.7 * step) for step in range(17)]
    assert classes_of(*steady, OUT_OF_MEMORY)[0] is LEAK


def test_a_small_growth_of_a_gpu_that_filled_up_is_no_leak() -> None:
    [best] = diagnoses_of(*[f"step {step} mem {30 + 0.02 * step:.2f} GB" for step in range(100)], OUT_OF_MEMORY)
    assert (best.failure_class, best.confidence) == (SPIKE, 0.45)


def test_the_states_of_a_progress_bar_in_one_line_are_a_series() -> None:
    bars = [f" 12%|█▏   | {step}/300 [00:12<10:00,  2.1s/it, mem={12 + 3.7 * step:.1f}G]" for step in range(17)]
    [series] = evidence_of("\r".join(bars)).series
    assert len(series.samples) == 17


def test_tables_and_queries_of_nvidia_smi_are_series_by_gpu() -> None:
    head = "|   {gpu}  NVIDIA H100 80GB HBM3          On  |   00000000:18:00.0 Off |                    0 |"
    row = "| N/A   41C    P0            120W /  700W |   {mib}MiB /  81559MiB |     87%      Default |"
    table = [line.format(gpu=gpu, mib=20_000 + gpu) for _ in range(3) for gpu in (0, 1) for line in (head, row)]
    query = [f"2026/01/01 10:0{n}:00.000, {gpu}, {20_000 + gpu} MiB, 81559 MiB" for n in range(3) for gpu in (0, 1)]
    for log in (table, query):
        series = evidence_of("\n".join(log)).series
        assert [(each.name, len(each.samples)) for each in series] == [("nvidia-smi GPU 0", 3), ("nvidia-smi GPU 1", 3)]
