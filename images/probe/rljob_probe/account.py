"""Account of a failing process: request, stack, engine, other processes, samples.

The values are JSON of `rljob_api.memory_failure.MemoryFailure`. It is made once, after memory ran out, and is bounded.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Callable, Iterable

from rljob_probe import cgroup, samples
from rljob_probe.circumstances import all_objects

TYPE_CHECKING = False
if TYPE_CHECKING:
    Place = tuple[str, int, str]
    """File, line and function."""


UNFAMILIAR = "Unfamiliar"
_MOST_FRAMES, _LONGEST_FRAME = 16, 110
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


def account(places: Iterable[Place], torch: Any = None) -> dict[str, Any]:
    """The account of an error whose words show its kind. `torch`: the module, if a GPU ran out."""
    parts: dict[str, Callable[[], Any]] = {"stack": lambda: _frames(places), "host": _host, "samples": samples.taken}
    if samples.activity():
        parts["activity"] = samples.activity
    if torch is not None:
        parts.update(engine=_engine, siblings=_other_processes)
    found = {name: _attempted(part) for name, part in parts.items()}
    return {"kind": UNFAMILIAR, **{name: value for name, value in found.items() if value or name == "siblings"}}


def account_of_request(
    places: Iterable[Place], torch: Any, device: int, requested: int, allowed: int, free: int
) -> dict[str, Any]:
    """The account of a request on `device` that failed in torch's allocator. `allowed`: memory of the GPU, or torch's
    share of it."""
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
    total = _attempted(lambda: torch.cuda.get_device_properties(device).total_memory) or allowed
    memory = {
        "requestedBytes": requested,
        "gpu": device,
        "totalBytes": total,
        "freeBytes": free,
        "allocatedBytes": allocated,
        "cachedBytes": max(reserved - allocated, 0),
        "allowedBytes": allowed if 0 < allowed < total else None,
        "largestCachedBlockBytes": _attempted(lambda: _largest_free_block(torch, device, stats)),
    }
    known = {name: value for name, value in memory.items() if value is not None}
    return {**account(places, torch), "kind": "Allocator", "device": known}


def _attempted(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception:
        return None  # the other parts are worth having


def _frames(places: Iterable[Place]) -> list[str]:
    """`file in function` of the innermost frames, the outermost first."""
    frames = [
        f"{_short(file)} in {function}"[-_LONGEST_FRAME:]
        for file, _, function in places
        if function not in _WRAPPERS and _OWN not in file
    ]
    return frames[:_MOST_FRAMES][::-1]


def _short(file: str) -> str:
    """Return the path of a library's file from its folder of packages on; of another file, the last 80 characters."""
    for folder in ("site-packages", "dist-packages"):
        place = file.rfind(folder)
        if place >= 0:
            return file[place:]
    return file[-80:]


def _host() -> dict[str, int]:
    numbers = {"limitBytes": cgroup.memory_limit_bytes() or 0, "oomKills": cgroup.oom_kills()}
    return {name: value for name, value in numbers.items() if value}


def _largest_free_block(torch: Any, device: int, stats: dict[str, int]) -> int | None:
    if stats.get("active.all.current", _MOST_BLOCKS) >= _MOST_BLOCKS:
        return None
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment.get("device", 0) == device]
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    return max(free, default=0)


def _engine() -> dict[str, Any] | None:
    """KV cache of a vLLM engine in this process, and whether it sleeps."""
    if "vllm" not in sys.modules:
        return None
    sizes, asleep = {}, False
    for thing in all_objects():
        name = type(thing).__name__
        if name.endswith("ModelRunner"):
            for tensor in _tensors(getattr(thing, "kv_caches", None)):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        elif name.endswith("Executor") and getattr(thing, "is_sleeping", False) is True:
            asleep = True
    return {"inProcess": True, "asleep": asleep, "kvCacheBytes": sum(sizes.values())} if sizes else None


def _tensors(caches: Any) -> list[Any]:
    if isinstance(caches, (list, tuple)):
        return [tensor for cache in caches for tensor in _tensors(cache)]
    return [caches] if hasattr(caches, "untyped_storage") else []


def _other_processes() -> list[str]:
    """Names of the other processes of the container that have a GPU open: children and siblings, no foreign ones."""
    names = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and _has_gpu_open(entry):
            try:
                with open(f"/proc/{entry}/comm", encoding="utf-8", errors="replace") as file:
                    names.append(file.read().strip())
            except OSError:
                continue  # it has just ended
    return sorted(names)[:_MOST_PROCESSES]


def _has_gpu_open(pid: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        targets = [os.readlink(f"{folder}/{number}") for number in os.listdir(folder)]
    except OSError:
        return False  # it has ended, or belongs to another user: not to this job
    return any(target.startswith("/dev/nvidia") and target[len("/dev/nvidia") :].isdigit() for target in targets)
