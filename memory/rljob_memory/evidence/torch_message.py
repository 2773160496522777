"""Reads the numbers of torch's out-of-memory message by the words next to them, in the wordings of torch 1.x to 2.15.

Source: c10/cuda/CUDACachingAllocator.cpp, `malloc`; also that of HIP, XPU, NPU and MPS, and of cudaMallocAsync. A log
may break the message over several lines, cut it, or leave parts of it out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob_api.memory_failure import MAX_PROCESSES_NAMED, DeviceMemory, GpuProcess
from rljob_memory.evidence.signatures import pattern
from rljob_memory.sizes import size_bytes

LONGEST_MESSAGE_CHARACTERS = 6_000
"""A message that names 64 other processes has about 3,500."""

_NUMBERS = ("total", "free", "allowed", "allocated", "pools", "cached", "reserved")
_BRACKETS = str.maketrans("", "", "[]")
"""Web pages put the optional parts of the message in brackets."""
_ROUNDED = 0.995
"""Sizes are printed with two decimals."""


def is_a_part(text: str) -> bool:
    """True if the line is a later part of a message that has begun above: it has one of its numbers, not its head."""
    if pattern("message_head").search(text):
        return False
    return any(pattern(f"message_{name}").search(text) for name in ("requested", "end", *_NUMBERS))


def parse_message(lines: Sequence[str]) -> DeviceMemory | None:
    """The numbers of the first message in lines that were broken between words or within one: of the two readings, the
    one with more. None if there is no request."""
    found = [device for text in (" ".join(lines), "".join(lines)) if (device := _parse(text))]
    return max(found, key=lambda device: len(device.numbers()), default=None)


def _parse(text: str) -> DeviceMemory | None:
    text = re.sub(r"\s+", " ", text.replace("\\n", " ").translate(_BRACKETS))
    first = pattern("message_requested").search(text)
    requested = size_bytes(first[1]) if first else None
    if first is None or requested is None:
        return None
    after = pattern("message_requested").search(text, first.end())
    # cudaMallocAsync and MPS name the memory in use before the request.
    start = max(text.rfind(head, 0, first.start()) for head in ("Allocation on device", "out of memory", "MPS backend"))
    message = text[max(start, 0) if start >= 0 else first.start() : after.start() if after else None]
    found = {name: _size_of(f"message_{name}", message) for name in _NUMBERS}
    allocated, cached = found["allocated"], found["cached"]
    if cached is None and allocated is not None and found["reserved"] is not None:
        cached = max(found["reserved"] - allocated, 0)
    own, others = _processes(message, None if allocated is None else allocated + (cached or 0))
    gpu = pattern("message_gpu").search(message)
    return DeviceMemory(
        requested_bytes=requested,
        gpu=int(gpu[1]) if gpu else None,
        total_bytes=found["total"],
        free_bytes=found["free"],
        allocated_bytes=allocated,
        cached_bytes=cached,
        process_bytes=own,
        allowed_bytes=found["allowed"],
        private_pool_bytes=found["pools"],
        others=others[:MAX_PROCESSES_NAMED],
    )


def _size_of(name: str, text: str) -> int | None:
    match = pattern(name).search(text)
    size = next((group for group in match.groups() if group), None) if match else None
    return size_bytes(size) if size else None


def _processes(text: str, reserved_bytes: int | None) -> tuple[int | None, list[GpuProcess]]:
    """Memory of the failing process, and the other processes.

    Inside a pod the IDs are the host's, so the message calls the process's own line `Process N` too. It is then the
    smallest process that can hold what torch has reserved, or the largest one if that number is missing.
    """
    own: int | None = None
    others: list[GpuProcess] = []
    for match in pattern("message_process").finditer(text):
        used = size_bytes(match["used"])
        if used is None:
            continue
        if match["pid"] is None:
            own = used or None  # 0 if NVML has no permission
        else:
            others.append(GpuProcess(pid=int(match["pid"]), used_bytes=used))
    if own is None and "this process" not in text:
        least = _ROUNDED * (
            reserved_bytes if reserved_bytes is not None else max((p.used_bytes for p in others), default=0)
        )
        candidates = [process for process in others if process.used_bytes >= least]
        if candidates:
            itself = min(candidates, key=lambda process: process.used_bytes)
            others.remove(itself)
            own = itself.used_bytes
    return own, others
