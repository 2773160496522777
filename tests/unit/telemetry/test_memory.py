from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from rljob_trainer.errors import OutputUnavailable
from rljob_trainer.telemetry.memory import MemoryLog, reset_peaks, sample_memory

MIB = 1 << 20


def test_a_sample_on_the_cpu_counts_host_memory_only() -> None:
    before = sample_memory("cpu")
    held = np.ones(64 * MIB, np.uint8)
    after = sample_memory("cpu")
    assert after.rss - before.rss > 50 * MIB
    assert after.peak_rss >= after.rss
    assert (after.allocated, after.reserved, after.device_total) == (0, 0, 0)
    del held


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_peaks_are_since_the_last_reset() -> None:
    held = np.ones(200 * MIB, np.uint8)
    del held
    high = sample_memory("cpu").peak_rss
    reset_peaks("cpu")
    assert sample_memory("cpu").peak_rss < high - 100 * MIB


def test_the_log_is_one_json_line_a_sample_and_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "policy-0.jsonl"
    begun = time.time()
    MemoryLog(path, "cpu").record(3, "update", 0)
    sample = MemoryLog(path, "cpu").record(3, "sync")
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert begun <= first["time"] <= time.time()
    assert (first["step"], first["phase"], first["micro_batch"]) == (3, "update", 0)
    assert (second["phase"], second["micro_batch"], second["rss"]) == ("sync", None, sample.rss)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named() -> None:
    with pytest.raises(OutputUnavailable, match="No space left"):
        MemoryLog(Path("/dev/full"), "cpu").record(1, "update")
