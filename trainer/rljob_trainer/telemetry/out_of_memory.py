"""Builds the account of a failed request for GPU memory, before the exception is raised.

When the exception is caught, the stack has been unwound and tensors have been freed: the state that explains the
failure is gone. torch calls an observer before that; the observer may look, and must not allocate GPU memory.
"""

from __future__ import annotations

import linecache
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

from rljob_api.memory_failure import (
    MAX_PROCESSES_NAMED,
    Activity,
    DeviceMemory,
    FailureKind,
    GpuProcess,
    HostUse,
    MemoryFailure,
)
from rljob_api.plan_change import Phase
from rljob_memory.evidence.activity import activity_of
from rljob_memory.evidence.torch_message import parse_message
from rljob_memory.sizes import human_bytes
from rljob_trainer.activities import current_activity
from rljob_trainer.telemetry.host_memory import host_memory
from rljob_trainer.telemetry.memory import Progress, allocator_sample, gpu_processes

_LONGEST_CODE = 200
_MOST_STACK_LINES = 80
_LARGEST_PICKLE_BYTES = 16 << 20
_MOST_BLOCKS_PICKLED = 60_000
"""About 200 bytes each. Counted first, so that no large pickle is made only to be thrown away."""
_ROUNDED = 0.01
"""More than the message of torch rounds a size."""
_PHASES: dict[str | None, Phase] = {phase: phase for phase in get_args(Phase)}
_ACTIVITY_OF_PHASE = {
    "load": Activity.MODEL_LOAD,
    "sync": Activity.WEIGHT_SYNC,
    "checkpoint": Activity.CHECKPOINT,
}

_latest: MemoryFailure | None = None


def attach_out_of_memory_observer(
    directory: Path, role: Literal["policy", "rollout"], rank: int, progress: Callable[[], Progress]
) -> None:
    """Have each request of this process that torch's CUDA allocator cannot serve leave its account.

    The error that follows takes it by `take_account`. Two files in `directory` keep it: `<role>-<rank>-step<k>.json`
    is a `MemoryFailure`; the `.pickle` with the same name is torch's own snapshot without stacks, for
    pytorch.org/memory_viz, which is left out above 16 MiB. At most one pair is written in a phase, however often the
    program retries. Call it once per process: it initializes CUDA (without a context), and nothing detaches it.
    """
    import torch

    observer = _Observer(directory, role, rank, progress)
    torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]


def take_account(message: str) -> MemoryFailure | None:
    """The account of the latest failed request of this process, once; None if `message`, torch's, is of another one.

    A program may have caught the error of the latest request, and gone on.
    """
    global _latest
    account, _latest = _latest, None
    parsed = parse_message([message])
    if account is None or account.requested_bytes is None or parsed is None or parsed.requested_bytes is None:
        return None
    return account if math.isclose(parsed.requested_bytes, account.requested_bytes, rel_tol=_ROUNDED) else None


@dataclass(slots=True)
class _Observer:
    directory: Path
    role: Literal["policy", "rollout"]
    rank: int
    progress: Callable[[], Progress]
    _last_phase: int = -1

    def __call__(self, device: int, requested: int, allowed: int, free: int) -> None:
        """Called by torch, in the thread that asked for memory. No error in here may hide the failure itself."""
        global _latest
        with suppress(Exception):
            import torch

            progress, snapshot = self.progress(), torch.cuda.memory._snapshot()
            _latest = self._account(progress, snapshot, device, requested, allowed, free)
            if progress.phases_begun != self._last_phase:
                self._last_phase = progress.phases_begun
                self._write(progress, snapshot, _latest)

    def _account(
        self, progress: Progress, snapshot: Mapping[str, Any], device: int, requested: int, allowed: int, free: int
    ) -> MemoryFailure:
        import torch

        total, host, sample = torch.cuda.get_device_properties(device).total_memory, host_memory(), allocator_sample()
        own, others = gpu_processes()
        return MemoryFailure(
            kind=FailureKind.ALLOCATOR,
            text=f"torch's allocator could not serve a request of {human_bytes(requested)}",
            time=datetime.now(UTC),
            role=self.role,
            rank=self.rank,
            step=progress.step or None,
            phase=_PHASES.get(progress.phase),
            micro_batch=progress.micro_batches_done,
            activity=current_activity() or self._activity(progress),
            device=DeviceMemory(
                requested_bytes=requested,
                gpu=device,
                total_bytes=total,
                free_bytes=free,
                allocated_bytes=sample.allocated_bytes,
                cached_bytes=max(sample.reserved_bytes - sample.allocated_bytes, 0),
                process_bytes=own,
                allowed_bytes=allowed if 0 < allowed < total else None,
                largest_cached_block_bytes=largest_free_block(snapshot),
                others=[GpuProcess(pid=pid, used_bytes=used) for pid, used in others[:MAX_PROCESSES_NAMED]],
            ),
            host=HostUse(
                used_bytes=host.host_used_bytes,
                limit_bytes=host.host_limit_bytes,
                oom_kills=host.oom_kills,
                shared_memory_used_bytes=host.shared_memory_used_bytes,
                shared_memory_bytes=host.shared_memory_bytes,
            ),
        )

    def _activity(self, progress: Progress) -> Activity | None:
        """Outside of all marks, the phase or the names in the stack show the work: the engine's steps have no marks."""
        of_phase = _ACTIVITY_OF_PHASE.get(progress.phase or "") if self.role == "policy" else None
        return of_phase or activity_of(stack())

    def _write(self, progress: Progress, snapshot: dict[str, Any], account: MemoryFailure) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"{self.role}-{self.rank}-step{progress.step}"
        text = account.model_dump_json(indent=1, by_alias=True, exclude_none=True)
        _write_whole(self.directory / f"{name}.json", text.encode())
        if (pickled := small_pickle(snapshot)) is not None:
            _write_whole(self.directory / f"{name}.pickle", pickled)


def largest_free_block(snapshot: Mapping[str, Any]) -> int:
    """Bytes of the largest free piece of memory that torch's allocator holds; 0 if there is none."""
    blocks = (block for segment in snapshot.get("segments", ()) for block in segment.get("blocks", ()))
    return max((int(block["size"]) for block in blocks if block["state"] == "inactive"), default=0)


def stack() -> list[str]:
    """`file in function` and the line of code of each frame: the main thread's, then this thread's, outermost first.

    In a backward pass a thread of autograd asks for memory, and the main thread shows the purpose.
    """
    frames = sys._current_frames()
    main, here = threading.main_thread().ident, threading.get_ident()
    lines = _lines(frames[here])
    if main is not None and main != here:
        lines = _lines(frames[main]) + lines
    return lines[-_MOST_STACK_LINES:]


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


def _write_whole(path: Path, content: bytes) -> None:
    """Replace the file at once, so that a reader finds the whole file or none."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
