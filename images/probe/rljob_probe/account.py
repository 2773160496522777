"""Account of a failing process, as lines of a log that `rljob diagnose` reads: stack, cache, engine, other processes.

It is made once, after memory ran out, and is bounded.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from types import FrameType, ModuleType, TracebackType
from typing import Any, Callable, Iterable

from rljob_probe.circumstances import all_objects

TYPE_CHECKING = False
if TYPE_CHECKING:
    Place = tuple[str, int, str]
    """File, line and function."""


_MARK = "rljob-probe: "
_MOST_STACK_CHARACTERS = 1000
_MOST_BLOCKS = 50_000
"""A snapshot of more blocks takes too long and too much host memory."""
_MOST_PROCESSES = 8
_WRAPPERS = frozenset(
    {"_call_impl", "_wrapped_call_impl", "wrapper", "decorate_context", "inner", "_fn", "__call__", "wrapped"}
)
_OWN = os.sep + "rljob_probe" + os.sep


def places_of_frames(frame: FrameType | None) -> list[Place]:
    """The stack of a frame, innermost first. Without one, that of the main thread: torch's thread for the backward pass
    has no Python frames, while the main thread waits for it."""
    if frame is None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = []
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return places


def places_of_traceback(traceback: TracebackType | None) -> list[Place]:
    """The stack of a traceback, innermost first."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return places[::-1]


def account(places: Iterable[Place], torch: Any = None, device: int = 0) -> str:
    """The lines. `torch`: the module, if a request on `device` failed in its allocator."""
    parts: list[Callable[[], str]] = [lambda: _stack(places)]
    if torch is not None:
        parts += [lambda: _largest_free_block(torch, device), _engine, _other_processes]
    parts.append(_step_samples)
    return "\n".join(text for text in map(_attempted, parts) if text)


def _attempted(part: Callable[[], str]) -> str:
    try:
        return part()
    except Exception:
        return ""  # the other parts are worth having


def _stack(places: Iterable[Place]) -> str:
    """The innermost frames that fit, the outermost first, as in a traceback."""
    lines: list[str] = []
    room = _MOST_STACK_CHARACTERS
    for file, number, function in places:
        if function in _WRAPPERS or _OWN in file:
            continue
        text = f'  File "{_short(file)}", line {number}, in {function}'
        room -= len(text) + 1
        if room < 0:
            break
        lines.append(text)
    return "\n".join(reversed(lines))


def _short(file: str) -> str:
    """Of a library's file, the part from its folder of packages on."""
    for folder in ("site-packages", "dist-packages"):
        place = file.rfind(folder)
        if place >= 0:
            return file[place:]
    return file[-80:]


def _largest_free_block(torch: Any, device: int) -> str:
    stats = torch.cuda.memory_stats(device)
    if stats.get("active.all.current", _MOST_BLOCKS) >= _MOST_BLOCKS:
        return ""
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment.get("device", 0) == device]
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    return f"{_MARK}largest free block {max(free, default=0)} bytes, {len(segments)} segments"


def _engine() -> str:
    """KV cache of a vLLM engine in this process, and whether it sleeps."""
    if "vllm" not in sys.modules:
        return ""
    sizes, asleep = {}, False
    for thing in all_objects():
        name = type(thing).__name__
        if name.endswith("ModelRunner"):
            for tensor in _tensors(getattr(thing, "kv_caches", None)):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        elif name.endswith("Executor") and getattr(thing, "is_sleeping", False) is True:
            asleep = True
    if not sizes:
        return ""
    return f"{_MARK}engine in this process: KV cache {sum(sizes.values())} bytes, {'asleep' if asleep else 'awake'}"


def _tensors(caches: Any) -> list[Any]:
    if isinstance(caches, (list, tuple)):
        return [tensor for cache in caches for tensor in _tensors(cache)]
    return [caches] if hasattr(caches, "untyped_storage") else []


def _other_processes() -> str:
    """Other processes of the container that have a GPU open: children and siblings, no foreign processes."""
    names = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and _has_gpu_open(entry):
            try:
                with open(f"/proc/{entry}/comm", encoding="utf-8", errors="replace") as file:
                    names.append(file.read().strip().replace(",", " "))
            except OSError:
                continue  # it has just ended
    return (
        f"{_MARK}other processes with a GPU in this container: {', '.join(sorted(names)[:_MOST_PROCESSES]) or 'none'}"
    )


def _has_gpu_open(pid: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        targets = [os.readlink(f"{folder}/{number}") for number in os.listdir(folder)]
    except OSError:
        return False  # it has ended, or belongs to another user: not to this job
    return any(target.startswith("/dev/nvidia") and target[len("/dev/nvidia") :].isdigit() for target in targets)


# Memory after each optimizer step: the last 64 samples, for the trend before a failure.
#
# There is at most one sample in a quarter of a second; docs/benchmarks.md has their cost.

SECONDS_BETWEEN_SAMPLES = 0.25
_MOST_SAMPLES, _MOST_WRITTEN = 64, 32

_samples: deque[tuple[int, int]] = deque(maxlen=_MOST_SAMPLES)
"""Bytes in tensors and bytes reserved; the first one is from before the first step."""
_taken_at = float("-inf")


def watch_steps(torch: ModuleType) -> None:
    """Sample before the first step of any optimizer and after each one. Does nothing if torch has no such hooks."""
    optimizers = sys.modules.get("torch.optim.optimizer")
    register_before = getattr(optimizers, "register_optimizer_step_pre_hook", None)
    register_after = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register_before is None or register_after is None:
        return
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", bool)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling() and not _samples:
            _sample(torch)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            _sample(torch)

    register_before(before)
    register_after(after)


def _step_samples() -> str:
    """The samples as a line that `rljob diagnose` reads; empty if there is none. Long series are thinned out."""
    if not _samples:
        return ""
    stride = -(-len(_samples) // _MOST_WRITTEN)
    latest_last = list(_samples)[::-1][::stride][::-1]
    gib = float(1 << 30)
    pairs = " ".join(f"{allocated / gib:.2f}/{reserved / gib:.2f}" for allocated, reserved in latest_last)
    return f"rljob-probe: allocated/reserved GiB after steps: {pairs}"


def _sample(torch: ModuleType) -> None:
    global _taken_at
    now = time.monotonic()
    if _samples and now - _taken_at < SECONDS_BETWEEN_SAMPLES and len(_samples) > 1:
        return
    try:
        stats = torch.cuda.memory_stats()
        _samples.append((stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]))
        _taken_at = now
    except Exception:
        pass  # the step of the program matters more
