"""Samples of memory, and their log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.memory_logs import logged_samples
from rljob_memory.sample import MemorySample
from rljob_trainer.telemetry.memory import MemoryLog, quick_sample, reset_peaks, sample_memory, sample_of_stats

MIB = 1 << 20


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


HOLD = """
import json, numpy as np
from rljob_trainer.telemetry.memory import sample_memory
before = sample_memory("cpu").as_line()
held = np.ones(64 << 20, np.uint8)
print(json.dumps([before, sample_memory("cpu").as_line()]))
"""
"""In a process of its own: the kernel may take unused pages of a large old one while the test allocates."""


def test_a_sample_on_the_cpu_counts_host_memory_only() -> None:
    before, after = json.loads(subprocess.run([sys.executable, "-c", HOLD], check=True, stdout=subprocess.PIPE).stdout)
    assert after["rss_bytes"] - before["rss_bytes"] > 50 * MIB
    assert 50 * MIB < after["anonymous_bytes"] - before["anonymous_bytes"] < after["rss_bytes"]
    assert after["peak_rss_bytes"] >= after["rss_bytes"]
    assert (after["allocated_bytes"], after["reserved_bytes"], after["device_total_bytes"]) == (0, 0, 0)
    assert 0 < after["host_used_bytes"] <= after["host_limit_bytes"]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_peaks_are_since_the_last_reset() -> None:
    held = np.ones(200 * MIB, np.uint8)
    del held
    high = sample_memory("cpu").peak_rss_bytes
    reset_peaks("cpu")
    assert sample_memory("cpu").peak_rss_bytes < high - 100 * MIB


def test_the_log_has_a_line_per_sample_with_the_start_of_its_phase(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "policy-0.jsonl"
    log = MemoryLog(path, "cpu")
    log.begin_phase(3, "update")
    log.record(3, "update", 0)
    log.record(3, "update")
    sample = MemoryLog(path, "cpu").record(3, "sync")
    micro_batch, end, between = lines_of(path)
    of_the_line = {"time", "began", "step", "phase", "micro_batch"}
    inexpensive = {"allocated_bytes", "reserved_bytes", "device_total_bytes", "rss_bytes", "anonymous_bytes"}
    assert set(micro_batch) == of_the_line | inexpensive
    assert {"host_used_bytes", "host_limit_bytes", "peak_rss_bytes"} <= set(end)
    assert (micro_batch["step"], micro_batch["phase"], micro_batch["micro_batch"]) == (3, "update", 0)
    assert (between["phase"], between["micro_batch"], between["rss_bytes"]) == ("sync", None, sample.rss_bytes)
    assert micro_batch["began"] == end["began"] <= micro_batch["time"] <= time.time()
    assert between["began"] is None


def test_the_log_has_the_current_step_and_phase(tmp_path: Path) -> None:
    log = MemoryLog(tmp_path / "policy-0.jsonl", "cpu")
    log.begin_phase(4, "update")
    assert (log.progress.step, log.progress.phase, log.progress.micro_batches_done) == (4, "update", None)
    log.record(4, "update", 0)
    assert log.progress.micro_batches_done == 1, "as many are done"
    begun = log.progress.phases_begun
    log.record(4, "update")
    assert (log.progress.step, log.progress.phase) == (4, None), "between two phases"
    log.begin_phase(4, "update")
    assert log.progress.phases_begun == begun + 1, "the same phase once more is another try"


def test_a_full_log_is_rotated_and_read_with_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "policy-0.jsonl"
    log = MemoryLog(path, "cpu", largest_bytes=4000)
    for step in range(1, 41):
        log.record(step, "update", 0)
    old = tmp_path / "policy-0.jsonl.old"
    assert sorted(tmp_path.iterdir()) == [path, old]
    assert max(path.stat().st_size, old.stat().st_size) < 5000
    steps = [sample.step for _, sample in logged_samples(tmp_path)]
    assert steps[0] is not None
    assert steps == list(range(steps[0], 41))
    assert len(steps) > len(lines_of(path))


LOG_AND_DIE = """
import os, signal, sys
from pathlib import Path
from rljob_trainer.telemetry.memory import MemoryLog
log = MemoryLog(Path(sys.argv[1]), "cpu")
for number in range(25):
    log.record(1, "update", number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_logged_samples_survive_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "policy-0.jsonl"
    assert subprocess.run([sys.executable, "-c", LOG_AND_DIE, path]).returncode == -signal.SIGKILL
    assert [line["micro_batch"] for line in lines_of(path)] == list(range(25))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named() -> None:
    with pytest.raises(OutputUnavailable, match="No space left"):
        MemoryLog(Path("/dev/full"), "cpu").record(1, "update")


# --- counters of torch: their form is that of torch.cuda.memory_stats_as_nested_dict, torch 2.6 to 2.14 ---


def pools(current: int, peak: int) -> dict[str, dict[str, int]]:
    return {
        "all": {"current": current, "peak": peak, "allocated": 10 * peak, "freed": 10 * peak - current},
        "small_pool": {"current": 1, "peak": 2, "allocated": 3, "freed": 2},
    }


def test_the_counters_are_of_all_pools_together() -> None:
    stats = {
        "allocated_bytes": pools(100, 700),
        "reserved_bytes": pools(400, 800),
        "active_bytes": pools(120, 720),
        "inactive_split_bytes": pools(90, 95),
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }
    found = sample_of_stats(stats)
    assert (found.allocated_bytes, found.peak_allocated_bytes, found.active_bytes) == (100, 700, 120)
    assert (found.reserved_bytes, found.peak_reserved_bytes, found.inactive_split_bytes) == (400, 800, 90)
    assert (found.alloc_retries, found.ooms) == (3, 1)
    few = {"allocated_bytes": {"all": {"current": 5}}}
    assert sample_of_stats(few) == MemorySample(allocated_bytes=5), "counters that torch lacks are zero"


class GpuOfTorch:
    """A GPU of 80 GiB, with 30 in tensors and 40 reserved."""

    free, total, initialized = 35, 80, True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self.reserved = 40
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, self.total))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda _device: self.stats(), raising=False)

    def stats(self) -> dict[str, Any]:
        return {"allocated_bytes": pools(30, 33), "reserved_bytes": pools(self.reserved, 44)}


def test_a_sample_of_a_gpu_is_of_the_allocator_and_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuOfTorch(monkeypatch)
    found = quick_sample("cuda").as_line()
    expected = {"allocated": 30, "reserved": 40, "peak_allocated": 33, "peak_reserved": 44}
    expected |= {"device_free": 35, "device_total": 80}
    assert {name: found[f"{name}_bytes"] for name in expected} == expected
    gpu.initialized = False
    before = quick_sample("cuda")
    assert (before.reserved_bytes, before.device_total_bytes) == (0, 0), "a sample makes no context"


def test_memory_released_by_a_sleeping_engine_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuOfTorch(monkeypatch)
    log = MemoryLog(tmp_path / "rollout-0.jsonl", "cuda")
    # The second number is of torch's own cache, in passing.
    for freed, uncached, asleep in ((25, 4, 25), (-10, 0, 15), (-16, 0, 0)):
        with log.behind_torch():
            gpu.free += freed + uncached
            gpu.reserved -= uncached
        assert log.record(1, "update").asleep_bytes == asleep
