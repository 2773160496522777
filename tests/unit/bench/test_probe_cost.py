"""Times of the probe's samples and hooks, with counters of a GPU that is not there."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.harness import probe_cost, probed_training
from bench.report.training import probe_on_gpu
from rljob_probe import step_memory

COUNTERS = {"allocated_bytes.all.current": 1 << 30, "reserved_bytes.all.current": 2 << 30}


class FakeTorch(SimpleNamespace):
    """torch with counters of a GPU. `reads`: how often they were read."""

    def __init__(self) -> None:
        super().__init__(reads=0)
        self.cuda = SimpleNamespace(memory_stats=self._memory_stats)
        self.compiler = torch.compiler

    def _memory_stats(self) -> dict[str, int]:
        self.reads += 1
        return COUNTERS


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """The probe's hooks on torch's optimizers, with no sample so far; removed after the test."""
    optimizers = sys.modules["torch.optim.optimizer"]
    for registered in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(optimizers, registered, OrderedDict())
    monkeypatch.setattr(step_memory, "_samples", deque(maxlen=64))
    monkeypatch.setattr(step_memory, "_taken_at", float("-inf"))
    fake = FakeTorch()
    step_memory.watch(fake)  # type: ignore[arg-type]
    return fake


def sgd_step() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()


def test_each_timed_sample_reads_the_counters(watched: Any) -> None:
    seconds = probe_cost.sample_seconds(step_memory, watched, 20, warm_up=3)
    assert (len(seconds), watched.reads) == (20, 23)
    assert all(taken > 0 for taken in seconds)


def test_a_sample_that_fails_is_an_error(watched: Any) -> None:
    watched.cuda.memory_stats = dict
    with pytest.raises(RuntimeError, match="expected a sample"):
        probe_cost.sample_seconds(step_memory, watched, 1)


def test_steps_are_measured_with_the_probe_in_them(watched: Any) -> None:
    row = probed_training.measured(sgd_step, step_memory, watched, steps=4, samples=10)
    assert row["sample_in_step_seconds"]["count"] == 4
    assert row["sample_seconds"]["count"] == 10
    assert 0 < row["idle_hook_seconds"] < row["step_seconds"]
    counted = probed_training.COUNTED_STEPS
    assert row["probe_calls"] == {"before": counted, "after": counted, "_sample": counted}


def test_idle_hooks_read_no_counters(watched: Any) -> None:
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.values()
    assert probe_cost.idle_hook_seconds(step_memory, watched, [*hooks], batches=2) > 0
    assert watched.reads == 2  # the two samples before, which ignore the interval


def test_a_process_without_the_probe_is_an_error(watched: Any) -> None:
    sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.clear()
    with pytest.raises(RuntimeError, match="found 1; start this process under the probe"):
        probed_training.measured(sgd_step, step_memory, watched)


def test_the_share_counts_the_slowest_kind_of_sample() -> None:
    row = {
        "interval_seconds": 0.25,
        "step_seconds": 0.5,
        "idle_hook_seconds": 1e-6,
        "sample_seconds": {"median": 1e-4},
        "sample_in_step_seconds": {"median": 2e-4},
        "queued": {"sample_seconds": {"median": 1.5e-4}},
    }
    assert probed_training.largest_share(row) == pytest.approx(0.08 + 0.0002)


def test_the_block_shows_the_share_and_the_work_left_on_the_gpu(watched: Any) -> None:
    row = probed_training.measured(sgd_step, step_memory, watched, steps=4, samples=10)
    queued = {"sample_seconds": row["sample_seconds"], "is_pending_after": True, "remaining_seconds": 0.4}
    row |= {"queued": queued, "parameter_tensors": 310, "allocated_blocks": 1244, "allocated_bytes": 3 << 30}
    recorded = {"script": "bench/programs/probe_overhead.py", "date": "2026-11-26", "device": "one GPU", "versions": {}}
    block = probe_on_gpu({**recorded, "note": "a model", "rows": [row | {"step_percent": 0.0612}]})
    assert "| work left on the GPU after these samples | 400 ms |" in block
    assert "| calls into the probe in 5 steps | `_sample` 5, `after` 5, `before` 5 |" in block
    assert "| blocks in use between steps | 1,244 (3.0 GiB) |" in block
    assert "| largest share of a step (calculated) | 0.061 % |" in block
