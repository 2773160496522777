"""Records the state of torch's allocator when a request fails, before the exception is raised.

When the exception is caught, the stack has been unwound and tensors have been freed: the state that explains the
failure is gone. torch calls an observer before that; the observer may look, and must not allocate GPU memory.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from rljob_memory.evidence.oom_snapshot import MOST_STACK_LINES, OomSnapshot, layout_of
from rljob_memory.sample import MemorySample
from rljob_trainer.telemetry.memory import Progress, allocator_sample

_LONGEST_CODE = 200
_LARGEST_PICKLE_BYTES = 16 << 20
_MOST_BLOCKS_PICKLED = 60_000
"""About 200 bytes each. Counted first, so that no large pickle is made only to be thrown away."""


def attach_out_of_memory_observer(
    directory: Path, role: Literal["policy", "rollout"], rank: int, progress: Callable[[], Progress]
) -> None:
    """Have each request of this process that torch's CUDA allocator cannot serve leave two files in `directory`.

    `<role>-<rank>-step<k>.json` is an `OomSnapshot`. The `.pickle` beside it is torch's own snapshot without stacks,
    for pytorch.org/memory_viz; above 16 MiB it is left out. At most one pair is written in a phase, however often the
    program retries. Call it once per process: it initializes CUDA (without a context), and nothing detaches it.
    """
    import torch

    observer = _Observer(directory, role, rank, progress, {"torch": torch.__version__})
    torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Observer:
    directory: Path
    role: Literal["policy", "rollout"]
    rank: int
    progress: Callable[[], Progress]
    versions: dict[str, str]
    _last_phase: int = -1

    def __call__(self, device: int, requested: int, allowed: int, free: int) -> None:
        """Called by torch, in the thread that asked for memory. No error in here may hide the failure itself."""
        with suppress(Exception):
            progress = self.progress()
            if progress.phases_begun != self._last_phase:
                self._last_phase = progress.phases_begun
                self._write(progress, device, requested, allowed, free)

    def _write(self, progress: Progress, device: int, requested: int, allowed: int, free: int) -> None:
        import torch

        snapshot = torch.cuda.memory._snapshot()
        record = OomSnapshot(
            time=time.time(),
            role=self.role,
            rank=self.rank,
            step=progress.step,
            phase=progress.phase,
            micro_batch=progress.micro_batches_done,
            gpu=device,
            requested_bytes=requested,
            allowed_bytes=allowed,
            device_free_bytes=free,
            device_total_bytes=torch.cuda.get_device_properties(device).total_memory,
            counters=_counters(allocator_sample()),
            layout=layout_of(snapshot),
            stack=stack(),
            versions=self.versions,
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"{self.role}-{self.rank}-step{progress.step}"
        _write_whole(self.directory / f"{name}.json", record.model_dump_json(indent=1).encode())
        if (pickled := small_pickle(snapshot)) is not None:
            _write_whole(self.directory / f"{name}.pickle", pickled)


def stack() -> list[str]:
    """`file in function` and the line of code of each frame: the main thread's, then this thread's, outermost first.

    In a backward pass a thread of autograd asks for memory, and the main thread shows the purpose.
    """
    frames = sys._current_frames()
    main, here = threading.main_thread().ident, threading.get_ident()
    lines = _lines(frames[here])
    if main is not None and main != here:
        lines = _lines(frames[main]) + lines
    return lines[-MOST_STACK_LINES:]


def small_pickle(snapshot: dict[str, Any]) -> bytes | None:
    """The snapshot as a pickle; None if that has more than 16 MiB."""
    blocks = sum(len(segment["blocks"]) for segment in snapshot["segments"])
    pickled = pickle.dumps(snapshot) if blocks <= _MOST_BLOCKS_PICKLED else b""
    return pickled if 0 < len(pickled) <= _LARGEST_PICKLE_BYTES else None


def _lines(frame: FrameType | None) -> list[str]:
    """The frame and its callers, without the observer's own frames."""
    lines: list[str] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__:
            code = linecache.getline(file, frame.f_lineno).strip()[:_LONGEST_CODE]
            lines = [f"{file} in {frame.f_code.co_name}", code, *lines]
        frame = frame.f_back
    return lines


def _counters(sample: MemorySample) -> dict[str, int]:
    """The allocator's numbers, those that are 0 included."""
    return {
        "allocated_bytes": sample.allocated_bytes,
        "reserved_bytes": sample.reserved_bytes,
        "peak_allocated_bytes": sample.peak_allocated_bytes,
        "peak_reserved_bytes": sample.peak_reserved_bytes,
        "active_bytes": sample.active_bytes,
        "inactive_split_bytes": sample.inactive_split_bytes,
        "alloc_retries": sample.alloc_retries,
        "ooms": sample.ooms,
    }


def _write_whole(path: Path, content: bytes) -> None:
    """Replace the file at once, so that a reader finds the whole file or none."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
