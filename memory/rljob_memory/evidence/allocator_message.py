"""Parses torch's out-of-memory message, in the wordings of torch 1.x to 2.15, on CUDA, HIP, XPU and NPU.

Source: c10/cuda/CUDACachingAllocator.cpp, `malloc`. The hints after the numbers differ by version and are not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob_memory.evidence.failure import DeviceMemory, GpuProcess
from rljob_memory.sizes import SIZE, size_bytes

START = re.compile(
    r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory(?!\. Allocation was preemptively rejected)(?:\.|$| \()"
    r"|Allocation on device \d{1,4} would exceed allowed memory"
)
"""The beginning of a message. A log may break it over several lines. The second form is that of cudaMallocAsync."""

HEADLESS_START = re.compile(
    rf"\bTried to allocate {SIZE}(?:\. (?:GPU|XPU|NPU) \d{{1,4}} has a total| \((?:GPU|XPU|NPU) \d{{1,4}}; )"
)
"""A message whose first words, which name the error, stand in another line or nowhere: posts begin with the numbers."""

REMAINDER = re.compile(
    rf"\bTried to allocate {SIZE}|has a total capaci?ty of|{SIZE} (?:total capacity|already allocated);"
    rf"|{SIZE} is (?:allocated by [Pp]y[Tt]orch|reserved by [Pp]y[Tt]orch but unallocated)"
    rf"|{SIZE} reserved in total by [Pp]y[Tt]orch|reserved memory is >> allocated|[Uu]nallocated memory is large try"
    r"|(?:expandable_segments:True|max_split_size_mb) to avoid fragmentation"
)
"""Any later part of a message: a post may begin within it, and only torch prints these words, when it has failed."""

LONGEST_MESSAGE_CHARACTERS = 6_000
"""With 64 other processes named it has about 3,500."""

_PLAIN = str.maketrans("\t\r\n\xa0", "    ", "[]")
"""Line breaks become spaces. Brackets are dropped: a web page uses them for the parts that not every message has."""

_MESSAGE = re.compile(
    rf"Tried to allocate (?P<requested>{SIZE})\. "
    rf"(?:GPU|XPU|NPU) (?P<gpu>\d{{1,4}}) has a total capaci?ty of (?P<total>{SIZE}) "
    rf"of which (?P<free>{SIZE}) is free\. "
    rf"(?P<processes>(?:(?:Including non-PyTorch memory, this process|Process \d{{1,10}}) "
    rf"has {SIZE} memory in use\. )*)"
    rf"(?:(?P<allowed>{SIZE}) allowed; )?"
    rf"Of the allocated memory (?P<allocated>{SIZE}) is allocated by [Pp]y[Tt]orch, "
    rf"(?:with (?P<pools>{SIZE}) allocated in private pools \(e\.g\., \w+ Graphs\), )?"
    rf"and (?P<cached>{SIZE}) is reserved by [Pp]y[Tt]orch but unallocated"
)
_PROCESS = re.compile(rf"(?P<who>this process|Process (?P<pid>\d+)) has (?P<used>{SIZE})(?: memory)? in use")

_OLD_MESSAGE = re.compile(
    rf"Tried to allocate (?P<requested>{SIZE}) \((?:GPU|XPU|NPU) (?P<gpu>\d{{1,4}}); "
    rf"(?P<total>{SIZE}) total capacity; (?P<allocated>{SIZE}) already allocated; "
    rf"(?:(?P<current>{SIZE}) current active; )?(?P<free>{SIZE}) free; "
    rf"(?:(?P<allowed>{SIZE}) allowed; )?"
    rf"(?:(?P<reserved>{SIZE}) reserved in total by [Pp]y[Tt]orch|(?P<cached>{SIZE}) cached)\)"
)
_SHORTENED_MESSAGE = re.compile(
    rf"out of memory\. Tried to allocate (?P<requested>{SIZE})\. "
    rf"Of the allocated memory (?P<allocated>{SIZE}) is allocated by [Pp]y[Tt]orch, "
    rf"(?:with {SIZE} allocated in private pools \(e\.g\., \w+ Graphs\), )?"
    rf"and (?P<cached>{SIZE}) is reserved by [Pp]y[Tt]orch but unallocated"
)
"""Without the numbers of the device, which people leave out."""
_ASYNC_NUMBERS = (
    rf"Allocation on device (?P<gpu>\d{{1,4}}) would exceed allowed memory\.?(?: \(out of memory\))? ?"
    rf"Currently allocated ?:? (?P<allocated>{SIZE}) Requested ?:? (?P<requested>{SIZE}) "
    rf"Device limit ?:? (?P<total>{SIZE}) Free \(according to CUDA\): (?P<free>{SIZE})"
)
_ASYNC_MESSAGE = re.compile(
    rf"{_ASYNC_NUMBERS} PyTorch limit \(set by user-supplied memory fraction\) ?: (?P<allowed>{SIZE})"
)
_ASYNC_WITHOUT_LIMIT = re.compile(_ASYNC_NUMBERS)
"""A message that is cut before its last number."""
_MPS_MESSAGE = re.compile(
    rf"MPS backend out of memory \(MPS allocated: (?P<allocated>{SIZE})(?:, other allocations: {SIZE})?, "
    rf"max allowed: (?P<total>{SIZE})\)\. Tried to allocate (?P<requested>{SIZE})"
)
_REQUEST = re.compile(rf"Tried to allocate (?P<size>{SIZE})")
_GPU = re.compile(r"\b(?:GPU|XPU|NPU) (\d{1,4})\b")
_FACTS = {
    "total": re.compile(rf"total capaci?ty of ({SIZE})|({SIZE}) total capacity"),
    "free": re.compile(rf"\bof which ({SIZE}) is free|; ({SIZE}) free\b"),
    "allowed": re.compile(rf"({SIZE}) allowed\b"),
    "allocated": re.compile(rf"({SIZE}) (?:is allocated by [Pp]y[Tt]orch|already allocated)"),
    "pools": re.compile(rf"({SIZE}) allocated in private pools"),
    "cached": re.compile(rf"({SIZE}) (?:is reserved by [Pp]y[Tt]orch but unallocated|cached\b)"),
    "reserved": re.compile(rf"({SIZE}) reserved in total by [Pp]y[Tt]orch"),
}
"""Each number of a message by the words next to it, in the wordings of all versions."""
_REJECTED = re.compile(
    r"Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit\. "
    rf"Requested size: (?P<size>{SIZE})"
)


def parse_allocator_message(text: str) -> DeviceMemory | None:
    """The numbers of the first complete message in `text`, which may have line breaks inside; None if there is none."""
    flat = _flat(text)
    if match := _MESSAGE.search(flat):
        return _from_message(match)
    if match := _OLD_MESSAGE.search(flat):
        return _from_old_message(match)
    if match := _ASYNC_MESSAGE.search(flat):
        return _from_sizes(match)
    if (match := _MPS_MESSAGE.search(flat)) and (requested := size_bytes(match["requested"])) is not None:
        total, allocated = size_bytes(match["total"]), size_bytes(match["allocated"])
        return DeviceMemory(requested, total_bytes=total, allocated_bytes=allocated)
    if (match := _SHORTENED_MESSAGE.search(flat)) and (requested := size_bytes(match["requested"])) is not None:
        allocated, cached = size_bytes(match["allocated"]), size_bytes(match["cached"])
        return DeviceMemory(requested, allocated_bytes=allocated, cached_bytes=cached)
    return None


def parse_torn_message(text: str) -> DeviceMemory | None:
    """The numbers in a message that is cut, abbreviated or interrupted, each by the words next to it.

    None if `text` has not even the request.
    """
    if match := _ASYNC_WITHOUT_LIMIT.search(flat := _flat(text)):
        return _from_sizes(match)
    begin = _REQUEST.search(flat)
    requested = size_bytes(begin["size"]) if begin else None
    if begin is None or requested is None:
        return parse_request(text)
    end = _REQUEST.search(flat, begin.end())
    message = flat[begin.end() : end.start() if end else None]
    found = {name: _size_of(pattern, message) for name, pattern in _FACTS.items()}
    allocated, cached = found["allocated"], found["cached"]
    if cached is None and allocated is not None and found["reserved"] is not None:
        cached = max(found["reserved"] - allocated, 0)
    own, others = _processes(message, (allocated or 0) + (cached or 0))
    if allocated is None and others and own is not None and "this process" not in message:
        # Which one it is stands in the lost part: at least all but the largest are others.
        everything = sorted((*others, GpuProcess(0, own)), key=lambda process: process.used_bytes)
        own, others = everything[-1].used_bytes, tuple(everything[:-1])
    gpu = _GPU.search(message)
    return DeviceMemory(
        requested,
        gpu=int(gpu[1]) if gpu else None,
        total_bytes=found["total"],
        free_bytes=found["free"],
        allocated_bytes=allocated,
        cached_bytes=cached,
        process_bytes=own,
        allowed_bytes=found["allowed"],
        private_pool_bytes=found["pools"],
        others=others,
    )


def parse_broken_message(lines: Sequence[str]) -> DeviceMemory | None:
    """The numbers of a complete message in lines that were broken between words or within one; None if it has none."""
    return parse_allocator_message(" ".join(lines)) or parse_allocator_message("".join(lines))


def parse_torn_lines(lines: Sequence[str]) -> DeviceMemory | None:
    """As `parse_torn_message`, of lines that were broken between words or within one: from the reading with more."""
    found = [device for text in (" ".join(lines), "".join(lines)) if (device := parse_torn_message(text))]
    return max(found, key=lambda device: len(device.numbers()), default=None)


def _size_of(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    size = next((group for group in match.groups() if group), None) if match else None
    return size_bytes(size) if size else None


def parse_request(text: str) -> DeviceMemory | None:
    """The size of the request in a message that is cut short; None if `text` has none."""
    if match := _REQUEST.search(text) or _REJECTED.search(text):
        requested = size_bytes(match["size"])
        return DeviceMemory(requested) if requested is not None else None
    return None


def _flat(text: str) -> str:
    """`text` in one line. Line ends may be escaped, if a program printed the message inside of another one."""
    return re.sub(" {2,}", " ", text.replace("\\n", " ").translate(_PLAIN))


def _from_message(match: re.Match[str]) -> DeviceMemory | None:
    requested, total, free = (size_bytes(match[name]) for name in ("requested", "total", "free"))
    allocated, cached = size_bytes(match["allocated"]), size_bytes(match["cached"])
    if requested is None:
        return None
    own, others = _processes(match["processes"], (allocated or 0) + (cached or 0))
    return DeviceMemory(
        requested,
        gpu=int(match["gpu"]),
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=allocated,
        cached_bytes=cached,
        process_bytes=own,
        allowed_bytes=size_bytes(match["allowed"]) if match["allowed"] else None,
        private_pool_bytes=size_bytes(match["pools"]) if match["pools"] else None,
        others=others,
    )


def _from_old_message(match: re.Match[str]) -> DeviceMemory | None:
    requested, total, free, allocated = (
        size_bytes(match[name]) for name in ("requested", "total", "free", "allocated")
    )
    if requested is None or allocated is None:
        return None
    if match["cached"]:  # torch up to 1.4
        cached = size_bytes(match["cached"])
    else:
        cached = max((size_bytes(match["reserved"]) or 0) - allocated, 0)
    return DeviceMemory(
        requested,
        gpu=int(match["gpu"]),
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=allocated,
        cached_bytes=cached,
        allowed_bytes=size_bytes(match["allowed"]) if match["allowed"] else None,
    )


def _from_sizes(match: re.Match[str]) -> DeviceMemory | None:
    """The sizes that `match` has by name, of a message without other processes and cache. cudaMallocAsync keeps its
    cache to itself, and a torn message has lost it."""
    found = {name: size_bytes(text) for name, text in match.groupdict().items() if text and name != "gpu"}
    requested = found.get("requested")
    if requested is None:
        return None
    return DeviceMemory(
        requested,
        gpu=int(match["gpu"]),
        total_bytes=found.get("total"),
        free_bytes=found.get("free"),
        allocated_bytes=found.get("allocated"),
        allowed_bytes=found.get("allowed"),
    )


def _processes(text: str, reserved_bytes: int) -> tuple[int | None, tuple[GpuProcess, ...]]:
    """Memory of the failing process, and the other processes.

    Inside a pod NVML's pids are the host's, so the message calls the process's own line `Process N` too. It is then
    the smallest process that can hold the memory that torch has reserved (half a percent less for the rounding).
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
            others.append(GpuProcess(int(match["pid"]), used))
    if own is None:
        candidates = [process for process in others if process.used_bytes >= 0.995 * reserved_bytes]
        if candidates:
            self_line = min(candidates, key=lambda process: process.used_bytes)
            others.remove(self_line)
            own = self_line.used_bytes
    return own, tuple(others)
