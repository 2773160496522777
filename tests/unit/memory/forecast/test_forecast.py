"""Samples of memory, and early warnings: growth that is detected in time, and memory use without a warning."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rljob_api.step_report import MemoryPressure
from rljob_memory.forecast import Forecast, worth_preventing
from rljob_memory.sample import MemorySample, current_name
from rljob_memory.sizes import GIB, MIB
from rljob_memory.trend import kendall_tau, ongoing_growth, theil_sen_slope

CARD = 80 * GIB
PLAIN = MemorySample(
    allocated_bytes=10 * GIB,
    reserved_bytes=11 * GIB,
    peak_allocated_bytes=40 * GIB,
    peak_reserved_bytes=42 * GIB,
    device_free_bytes=59 * GIB,
    device_total_bytes=CARD,
    rss_bytes=4 * GIB,
    host_used_bytes=20 * GIB,
    host_limit_bytes=128 * GIB,
    shared_memory_used_bytes=GIB,
    shared_memory_bytes=16 * GIB,
)
"""A policy of 10 GiB that needs 30 more in the update, on a card whose engine sleeps in 10."""
Memory = partial(replace, PLAIN)
ON_A_CPU = Memory(
    **{f"{name}_bytes": 0 for name in ("allocated", "reserved", "peak_allocated", "peak_reserved")},
    device_free_bytes=0,
    device_total_bytes=0,
)


def leaking(grown: int) -> MemorySample:
    """The sample after tensors have grown by this many bytes."""
    return Memory(
        allocated_bytes=10 * GIB + grown,
        reserved_bytes=11 * GIB + grown,
        peak_allocated_bytes=40 * GIB + grown,
        device_free_bytes=59 * GIB - grown,
    )


def warned(
    steps: Iterable[MemorySample], *, total: int | None = None, phase: str = "update"
) -> Iterator[MemoryPressure | None]:
    """The warning after each step, if any."""
    forecast = Forecast(steps=total)
    for number, sample in enumerate(steps, start=1):
        forecast.observe(number, {"policy-0": {phase: sample}})
        yield forecast.pressure()


def first_warning(steps: Iterable[MemorySample]) -> tuple[int, MemoryPressure]:
    return next((step, pressure) for step, pressure in enumerate(warned(steps), start=1) if pressure is not None)


# --- what is seen in time ---


def test_retained_tensors_are_detected_with_the_steps_left() -> None:
    leak = 512 * MIB
    step, pressure = first_warning(leaking(step * leak) for step in range(1, 40))
    assert step <= 8
    assert pressure.diagnosis.class_name == "RetainedGraph"
    runs_out = next(s for s in range(1, 200) if 10 * GIB + 40 * GIB + s * leak > CARD)
    assert step + pressure.steps_left == pytest.approx(runs_out, abs=2)
    assert "512 MiB per step" in pressure.diagnosis.message


def test_a_retained_cache_is_detected_by_the_memory_left_to_the_engine() -> None:
    """Reserved memory as published for Trinity-RFT 541: 30.1, 34.0 and 38.2 GiB in steps 1, 5 and 9."""
    forecast = Forecast()
    for step in range(1, 13):
        policy = Memory(reserved_bytes=(29 + step) * GIB, device_free_bytes=(51 - step) * GIB)
        engine = Memory(
            allocated_bytes=40 * GIB,
            reserved_bytes=40 * GIB,
            peak_reserved_bytes=40 * GIB,
            device_free_bytes=(14 - step) * GIB,
        )
        forecast.observe(step, {"policy-0": {"update": policy}, "rollout-0": {"rollout": engine}})
        if pressure := forecast.pressure():
            break
    assert pressure is not None
    assert (pressure.diagnosis.class_name, pressure.role, pressure.rank) == ("AllocatorCache", "policy", 0)
    assert pressure.steps_left == 14 - step, "the engine's room counts, not the policy's own"


@pytest.mark.parametrize(
    ("steps", "class_name", "runs_out"),
    [
        (
            [
                Memory(
                    reserved_bytes=(15 + n) * GIB, inactive_split_bytes=(4 + n) * GIB, device_free_bytes=(55 - n) * GIB
                )
                for n in range(20)
            ],
            "Fragmentation",
            None,
        ),
        # on a CPU too
        ([replace(ON_A_CPU, host_used_bytes=(20 + 3 * n) * GIB) for n in range(12)], "HostMemory", None),
        ([replace(ON_A_CPU, shared_memory_used_bytes=n * GIB) for n in range(12)], "SharedMemory", 17),
    ],
)
def test_growth_has_its_cause(steps: list[MemorySample], class_name: str, runs_out: int | None) -> None:
    step, pressure = first_warning(steps)
    assert pressure.diagnosis.class_name == class_name
    assert runs_out is None or step + pressure.steps_left == pytest.approx(runs_out, abs=1)


def test_growing_peaks_are_fragmentation_more_surely_after_retries() -> None:
    calm, pressed = (
        first_warning(Memory(peak_reserved_bytes=(42 + n) * GIB, alloc_retries=n * retries) for n in range(12))[1]
        for retries in (0, 1)
    )
    assert calm.diagnosis.class_name == pressed.diagnosis.class_name == "Fragmentation"
    assert pressed.diagnosis.confidence > calm.diagnosis.confidence


@given(st.integers(80, 4000), st.integers(0, 2**32))
def test_a_leak_with_noise_of_a_tenth_is_detected_before_it_kills(leak_mib: int, seed: int) -> None:
    noise, leak = random.Random(seed), leak_mib * MIB
    dies_at = 30 * GIB // leak
    assume(dies_at >= 12)
    grown = [step * leak + noise.randint(-leak // 10, leak // 10) for step in range(1, dies_at)]
    step, pressure = first_warning(map(leaking, grown))
    assert step < dies_at
    assert pressure.diagnosis.class_name == "RetainedGraph"


# --- what is no reason to warn ---


@given(st.integers(0, 2**32), st.integers(0, 4 * GIB))
def test_noise_gives_no_warning(seed: int, width: int) -> None:
    noise = random.Random(seed)

    def at() -> MemorySample:
        held, peak = noise.randint(0, width), noise.randint(0, 2 * width)
        return Memory(
            allocated_bytes=10 * GIB + noise.randint(0, width // 8),
            reserved_bytes=12 * GIB + held,
            peak_allocated_bytes=40 * GIB + peak,
            peak_reserved_bytes=42 * GIB + peak + noise.randint(0, width),
            device_free_bytes=58 * GIB - held,
            host_used_bytes=20 * GIB + noise.randint(0, width),
            shared_memory_used_bytes=noise.randint(0, width),
        )

    assert not any(warned(at() for _ in range(40)))


@given(st.lists(st.integers(0, 4 * GIB), min_size=2, max_size=2))
def test_one_time_allocations_of_the_first_steps_give_no_warning(jumps: list[int]) -> None:
    grown = [0, jumps[0], sum(jumps)] + [sum(jumps)] * 30
    assert not any(
        warned(
            Memory(allocated_bytes=10 * GIB + more, reserved_bytes=20 * GIB + more, device_free_bytes=50 * GIB - more)
            for more in grown
        )
    )


def test_a_cache_that_settles_gives_warnings_only_while_it_grows() -> None:
    """Each new maximum length allocates another block, and new maxima become rarer."""
    noise = random.Random(7)
    false_alarms = 0
    for _ in range(200):
        cache = accumulate((noise.randint(0, 8 * GIB) for _ in range(60)), max)
        samples = [Memory(reserved_bytes=12 * GIB + held, device_free_bytes=58 * GIB - held) for held in cache]
        false_alarms += any(warned(samples))
    assert false_alarms <= 4, f"{false_alarms} of 200 jobs that were never in danger"


def test_a_recorded_successful_run_gives_no_warning() -> None:
    """examples/digits.yaml on a CPU: 60 steps, on a machine shared with other programs."""
    forecast = Forecast(steps=60)
    for line in (Path(__file__).parent / "digits_on_cpu.jsonl").read_text().splitlines():
        recorded = json.loads(line)
        samples = {
            actor: {
                phase: replace(ON_A_CPU, **{current_name(name): size for name, size in sizes.items()})
                for phase, sizes in phases.items()
            }
            for actor, phases in recorded["samples"].items()
        }
        forecast.observe(recorded["step"], samples)
        assert forecast.pressure() is None


SLOW = [Memory(allocated_bytes=10 * GIB + step * 100 * MIB) for step in range(60)]


def test_growth_beyond_the_end_of_the_job_gives_no_warning() -> None:
    assert any(warned(SLOW))
    assert not any(warned(SLOW, total=70))


def test_the_projection_covers_at_most_ten_times_the_observed_steps() -> None:
    assert not any(warned(Memory(shared_memory_used_bytes=step * 20 * MIB) for step in range(20))), "800 steps away"


def test_a_sleeping_engine_has_released_its_memory() -> None:
    """torch still counts memory that a sleeping engine has released as reserved."""
    asleep = [Memory(reserved_bytes=(20 + step) * GIB, asleep_bytes=(9 + step) * GIB) for step in range(20)]
    assert not any(warned(asleep, phase="rollout"))


def test_a_new_plan_starts_a_new_series() -> None:
    forecast = Forecast()
    for step in range(1, 12):
        forecast.observe(step, {"policy-0": {"update": Memory(shared_memory_used_bytes=step * GIB)}})
    assert forecast.pressure() is not None
    forecast.forget()
    assert forecast.pressure() is None


# --- memory that an engine keeps while it sleeps ---


def kept_by_the_engine(*, engines_sleep: bool) -> MemoryPressure | None:
    """The warning after 12 steps in which the memory beside the policy grows by 2 GiB a step."""
    forecast = Forecast()
    for step in range(1, 13):
        policy = Memory(device_free_bytes=(59 - 2 * step) * GIB)
        forecast.observe(step, {"policy-0": {"update": policy}}, engines_sleep=engines_sleep)
    return forecast.pressure()


def test_memory_that_a_sleeping_engine_keeps_is_attributed_to_it() -> None:
    assert kept_by_the_engine(engines_sleep=False) is None
    pressure = kept_by_the_engine(engines_sleep=True)
    assert pressure is not None
    assert (pressure.diagnosis.class_name, pressure.role, pressure.rank) == ("EngineNotAsleep", "rollout", 0)
    assert "2.00 GiB per step" in pressure.diagnosis.message
    assert pressure.steps_left == (59 - 24 + 11 - 42) // 2, "the peak of the update has to fit"
    assert worth_preventing(pressure)


@pytest.mark.parametrize(
    ("class_name", "confidence", "steps_left", "worth"),
    [
        ("AllocatorCache", 0.75, 5, True),
        ("AllocatorCache", 0.75, 100, False),
        ("Fragmentation", 0.65, 5, False),
        ("HostMemory", 0.9, 5, False),
    ],
)
def test_the_plan_is_changed_early_only_live_and_with_high_confidence(
    class_name: str, confidence: float, steps_left: int, worth: bool
) -> None:
    found = first_warning(Memory(shared_memory_used_bytes=step * GIB) for step in range(9))[1]
    diagnosis = found.diagnosis.model_copy(update={"class_name": class_name, "confidence": confidence})
    pressure = found.model_copy(update={"diagnosis": diagnosis, "steps_left": steps_left})
    assert worth_preventing(pressure) is worth


# --- the trend ---


@given(st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=20))
def test_tau_is_between_minus_one_and_one_and_turns_with_the_order(values: list[int]) -> None:
    tau = kendall_tau(values)
    assert -1 <= tau <= 1
    assert kendall_tau(values[::-1]) == -tau


@given(st.integers(-(10**9), 10**9), st.integers(-(10**6), 10**6), st.integers(5, 30), st.data())
def test_the_slope_tolerates_outliers(start: int, slope: int, count: int, data: st.DataObject) -> None:
    values = [start + slope * number for number in range(count)]
    for _ in range(count // 10):
        values[data.draw(st.integers(0, count - 1))] += data.draw(st.integers(-(10**12), 10**12))
    assert theil_sen_slope(values) == pytest.approx(slope)


STEADY_GROWTH = st.lists(st.integers(2**24, 2**25), min_size=6, max_size=32).map(
    lambda increments: list(accumulate(increments))
)


@given(st.lists(st.integers(0, 2**40), max_size=32) | STEADY_GROWTH, st.integers(0, 2**30))
def test_detected_growth_is_positive_and_at_least_the_threshold(values: list[int], least: int) -> None:
    rise = ongoing_growth(values, least)
    if rise is not None:
        assert rise.slope_bytes > 0
        assert rise.growth_bytes == values[-1] - values[0] >= least
        assert sum(later > earlier for earlier, later in pairwise(values)) >= 1


# --- a sample, and its line in a log ---

samples = st.builds(
    MemorySample,
    time=st.none() | st.floats(0, 1e10),
    began=st.none() | st.floats(0, 1e10),
    step=st.none() | st.integers(0, 99),
    phase=st.none() | st.sampled_from(["load", "update"]),
    micro_batch=st.none() | st.integers(0, 99),
    **{field.name: st.integers(0, 1 << 40) for field in fields(MemorySample) if field.type == "int"},
)


@given(samples)
def test_line_of_a_sample_is_read_as_it_was_written(sample: MemorySample) -> None:
    assert MemorySample.from_line(json.loads(json.dumps(sample.as_line()))) == sample


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        # short names of older logs
        (
            {"step": 3, "phase": "sync", "allocated": 1, "peak_reserved": 2, "shm_used": 3, "shm_size": 4, "rss": 5},
            MemorySample(
                step=3,
                phase="sync",
                allocated_bytes=1,
                peak_reserved_bytes=2,
                shared_memory_used_bytes=3,
                shared_memory_bytes=4,
                rss_bytes=5,
            ),
        ),
        # values of another type are left out, but for the tensors
        (
            {"allocated_bytes": 1, "reserved_bytes": "2", "time": True, "phase": 7, "step": -1, "unknown": 3},
            MemorySample(allocated_bytes=1),
        ),
        ({"step": 1}, None),
        ({"allocated": -1}, None),
        ({"allocated": True}, None),
        ({"allocated": "1"}, None),
    ],
)
def test_a_line_has_the_values_that_are_right(line: dict[str, Any], sample: MemorySample | None) -> None:
    assert MemorySample.from_line(line) == sample


@pytest.mark.parametrize(
    "at",
    [float("nan"), float("inf"), float("-inf"), 10**400],
    ids=["not a number", "infinity", "minus infinity", "a large integer"],
)
def test_a_time_that_is_not_finite_is_left_out(at: float) -> None:
    line = {"allocated_bytes": 1, "time": at, "began": at}
    assert MemorySample.from_line(line) == MemorySample(allocated_bytes=1)


def test_cache_is_unknown_if_only_tensors_were_logged() -> None:
    assert MemorySample(allocated_bytes=5).cache_bytes is None
    assert MemorySample(allocated_bytes=5, reserved_bytes=7).cache_bytes == 2
    assert MemorySample().cache_bytes == 0
