"""Cost of the memory log in the policy's update, and of a snapshot of a failed request.

    python -m bench.programs.memory_telemetry

Records `bench/results/memory_telemetry.json`. One rank with a model of Qwen3-0.6B's shape runs about 30 micro-batches
per update. Updates with the log and without it take turns, so that other load affects both alike. Their medians differ
by more noise than signal, so samples are also timed alone. Then a request of twice the GPU's memory fails twice in the
same phase; the first failure leaves a snapshot. Takes about 3 minutes on an H200.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

from bench.harness.memory_roles import (
    GIB,
    QWEN3_0_6B,
    TINY,
    Device,
    Row,
    arm,
    memory_settings,
    policy_config,
    random_rollouts,
    read_memory_log,
)
from bench.harness.record import RESULTS, record
from rljob_memory.evidence import read_evidence
from rljob_memory.sample import MemorySample
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.telemetry.memory import MemoryLog

MICRO_BATCH_TOKENS = 2_560
"""Of about 70,000 tokens per step."""
WARM_UP = 2
SAMPLES_TIMED = 200
PHASES_A_STEP = 3
"""Phases of the policy: update, sync, and at times a checkpoint. The engine has as many in its own process."""


def main(device: Device, updates: int, output: Path) -> None:
    workload = QWEN3_0_6B if device == "cuda" else TINY
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tokens = MICRO_BATCH_TOKENS if device == "cuda" else workload.longest
        config = policy_config(workload, device, memory_settings(workload, micro_batch_tokens=tokens), directory)
        rank = PolicyRank(0, 1, config)
        rank.connect(*rank.rendezvous())
        rank.load()
        batch = random_rollouts(workload, 1)
        with arm(rows, "log on and off in turn") as row:
            row |= both_ways(lambda: rank.update(batch).seconds, updates)
        with arm(rows, "samples alone") as row:
            row |= cost_of_samples(directory, device, rows[0])
        if device == "cuda":
            with arm(rows, "snapshot of a failed request") as row:
                row |= cost_of_a_snapshot(directory)
    note = f"{updates} updates each way; shares are of the update alone, which is a part of the step"
    print(record("memory_telemetry", rows, note, output))


def both_ways(update: Callable[[], float], updates: int) -> Row:
    """Median seconds of updates with the log and without, in turn."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(WARM_UP + updates):
        for way, log in (("on", nullcontext()), ("off", without_log())):
            with log:
                taken = update()
            if number >= WARM_UP:
                seconds[way].append(taken)
    on, off = statistics.median(seconds["on"]), statistics.median(seconds["off"])
    return {
        "update_seconds_on": on,
        "update_seconds_off": off,
        "difference_percent": 100 * (on - off) / off,
        "spread_percent": 100 * (max(seconds["off"]) - min(seconds["off"])) / off,
    }


def without_log() -> AbstractContextManager[object]:
    return mock.patch.multiple(
        MemoryLog, begin_phase=lambda *_: None, record=lambda *_: MemorySample(device_total_bytes=1)
    )


def cost_of_samples(directory: Path, device: Device, measured: Row) -> Row:
    """Microseconds of each kind of sample, and their share of an update."""
    logged = read_memory_log(directory)
    micro_batches = max(line["micro_batch"] or 0 for line in logged) + 1
    log = MemoryLog(directory / "timed" / "policy-0.jsonl", device)
    log.begin_phase(1, "update")
    micro_batch_us = microseconds(lambda: log.record(1, "update", 0))
    phase_us = microseconds(lambda: whole_phase(log))
    step_seconds = 1e-6 * (micro_batches * micro_batch_us + PHASES_A_STEP * phase_us)
    return {
        "micro_batches": micro_batches,
        "micro_batch_microseconds": micro_batch_us,
        "phase_microseconds": phase_us,
        "share_percent": 100 * step_seconds / measured["update_seconds_off"],
        "line_bytes": (directory / "timed" / "policy-0.jsonl").stat().st_size // (2 * SAMPLES_TIMED),
        "outside_torch_bytes": next(line.get("outside_torch", 0) for line in logged if line["phase"] == "load"),
    }


def whole_phase(log: MemoryLog) -> None:
    log.begin_phase(1, "update")
    log.record(1, "update")


def microseconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    for _ in range(SAMPLES_TIMED):
        call()
    return 1e6 * (time.perf_counter() - begun) / SAMPLES_TIMED


def cost_of_a_snapshot(directory: Path) -> Row:
    """Milliseconds of a failed request with a snapshot and without, and the contents of the snapshot."""
    import torch

    request_bytes = 2 * torch.cuda.get_device_properties(0).total_memory
    milliseconds = []
    for _ in range(2):
        begun = time.perf_counter()
        try:
            torch.empty(request_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            milliseconds.append(1e3 * (time.perf_counter() - begun))
    [snapshot] = (directory / "oom").glob("*.json")
    failure = read_evidence(directory).failure
    assert failure is not None
    assert failure.device is not None
    return {
        "milliseconds_with": milliseconds[0],
        "milliseconds_without": milliseconds[1],
        "json_bytes": snapshot.stat().st_size,
        "pickle_bytes": sum(path.stat().st_size for path in (directory / "oom").glob("*.pickle")),
        "requested_gib": failure.device.requested_bytes / GIB,
        "largest_free_block_bytes": failure.device.largest_cached_block_bytes,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a tiny model, to try it out")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
