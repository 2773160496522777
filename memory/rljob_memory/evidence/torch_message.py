"""Reads the numbers of torch's out-of-memory message by the words next to them, in the wordings of torch 1.x to 2.15.

Source: c10/cuda/CUDACachingAllocator.cpp, `malloc`; also that of HIP, XPU, NPU and MPS, and of cudaMallocAsync. A log
may break the message over several lines, cut it, or leave parts of it out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob_api.memory_failure import MAX_PROCESSES_NAMED, DeviceMemory, GpuProcess
from rljob_memory.sizes import SIZE, size_bytes

START = re.compile(
    r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory"
    r"(?!\. (?:Allocation was preemptively rejected|Tried to allocate more than 1EB))(?:\.|$| \()"
    rf"|Allocation on device \d{{1,4}} would exceed allowed memory|\bTried to allocate {SIZE}"
)
"""A line with the beginning of a message."""

REMAINDER = re.compile(
    rf"has a total capaci?ty of|{SIZE} (?:total capacity|already allocated);|reserved in total by [Pp]y[Tt]orch"
    r"|(?:is allocated|is reserved) by [Pp]y[Tt]orch|reserved memory is >> allocated|[Uu]nallocated memory is large try"
    r"|(?:expandable_segments:True|max_split_size_mb) to avoid fragmentation"
)
"""Any later part of a message: a quotation may begin within it, and only a failing torch prints these words."""

_HEAD = re.compile(r"out of memory\b|would exceed allowed memory")
UNMISTAKABLE = re.compile(rf"{SIZE}|would exceed allowed memory")
"""A line with a beginning and this is no advice."""

LAST_WORDS = re.compile(
    r"\bunallocated\b|reserved in total by|cached\)"
    rf"|memory fraction\)\s*:? *{SIZE}"
)
"""Parts of a message after which it has no more numbers."""

LONGEST_MESSAGE_CHARACTERS = 6_000
"""A message that names 64 other processes has about 3,500."""

_REQUESTED = re.compile(rf"(?:Tried to allocate|Requested(?: size)? ?:?) ({SIZE})")
_FACTS = {
    "total": rf"total capaci?ty of ({SIZE})|({SIZE}) total capacity|Device limit ?:? ({SIZE})|max allowed: ({SIZE})",
    "free": rf"\bof which ({SIZE}) is free|; ({SIZE}) free\b|Free \(according to CUDA\): ({SIZE})",
    "allowed": rf"({SIZE}) allowed\b|PyTorch limit \(set by user-supplied memory fraction\) ?: ({SIZE})",
    "allocated": rf"({SIZE}) (?:is allocated by [Pp]y[Tt]orch|already allocated)"
    rf"|(?:Currently|MPS) allocated ?:? ({SIZE})",
    "pools": rf"({SIZE}) allocated in private pools",
    "cached": rf"({SIZE}) (?:is reserved by [Pp]y[Tt]orch but unallocated|cached\b)",
    "reserved": rf"({SIZE}) reserved in total by [Pp]y[Tt]orch",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _FACTS.items()}
_GPU = re.compile(r"\b(?:GPU|XPU|NPU|on device) (\d{1,4})\b")
_PROCESS = re.compile(rf"(?P<who>this process|Process (?P<pid>\d+)) has (?P<used>{SIZE})(?: memory)? in use")
_BRACKETS = str.maketrans("", "", "[]")
"""Web pages put the optional parts of the message in brackets."""
_ROUNDED = 0.995
"""Sizes are printed with two decimals."""


def is_a_part(text: str) -> bool:
    """True if the line is a later part of a message that has begun above: it has one of its numbers, not its head."""
    if _HEAD.search(text):
        return False
    return any(pattern.search(text) for pattern in (_REQUESTED, LAST_WORDS, *_PATTERNS.values()))


def parse_message(lines: Sequence[str]) -> DeviceMemory | None:
    """The numbers of the first message in lines that were broken between words or within one: of the two readings, the
    one with more. None if there is no request."""
    found = [device for text in (" ".join(lines), "".join(lines)) if (device := _parse(text))]
    return max(found, key=lambda device: len(device.numbers()), default=None)


def _parse(text: str) -> DeviceMemory | None:
    text = re.sub(r"\s+", " ", text.replace("\\n", " ").translate(_BRACKETS))
    first = _REQUESTED.search(text)
    requested = size_bytes(first[1]) if first else None
    if first is None or requested is None:
        return None
    after = _REQUESTED.search(text, first.end())
    # cudaMallocAsync and MPS name the memory in use before the request.
    start = max(text.rfind(head, 0, first.start()) for head in ("Allocation on device", "out of memory", "MPS backend"))
    message = text[max(start, 0) if start >= 0 else first.start() : after.start() if after else None]
    found = {name: _size_of(pattern, message) for name, pattern in _PATTERNS.items()}
    allocated, cached = found["allocated"], found["cached"]
    if cached is None and allocated is not None and found["reserved"] is not None:
        cached = max(found["reserved"] - allocated, 0)
    own, others = _processes(message, None if allocated is None else allocated + (cached or 0))
    gpu = _GPU.search(message)
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


def _size_of(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    size = next((group for group in match.groups() if group), None) if match else None
    return size_bytes(size) if size else None


def _processes(text: str, reserved_bytes: int | None) -> tuple[int | None, list[GpuProcess]]:
    """Memory of the failing process, and the other processes.

    Inside a pod the IDs are the host's, so the message calls the process's own line `Process N` too. It is then the
    smallest process that can hold what torch has reserved, or the largest one if that number is missing.
    """
    own: int | None = None
    others: list[GpuProcess] = []
    for match in _PROCESS.finditer(text):
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
