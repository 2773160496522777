"""A profile of one update, for developers: `RLJOB_PROFILE_STEP=3` profiles the update of step 3 on every rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PROFILE_STEP = "RLJOB_PROFILE_STEP"
_ROWS = 60


@contextmanager
def profiled(step: int, rank: int, output_dir: Path) -> Iterator[None]:
    """Profile the block if it is the update of the step that the environment names.

    Writes a Chrome trace and a table of the operations, by their own time on the device, to `profile/` of the output
    directory. Profiling itself slows the step down.
    """
    if os.environ.get(PROFILE_STEP) != str(step):
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as taken:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    directory = output_dir / "profile"
    directory.mkdir(parents=True, exist_ok=True)
    name = f"update-step-{step}-policy-{rank}"
    taken.export_chrome_trace(str(directory / f"{name}.json.gz"))
    by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    (directory / f"{name}.txt").write_text(taken.key_averages().table(sort_by=by, row_limit=_ROWS), encoding="utf-8")
