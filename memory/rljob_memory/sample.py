"""Memory of one process at one moment: in the trainer, in its memory log, and in the evidence of a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeGuard


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Sizes are in bytes; 0 if there is none or if it was not measured."""

    time: float | None = None
    """When it was taken, in seconds since the epoch."""

    began: float | None = None
    """When its phase began, in seconds since the epoch. None between two phases."""

    step: int | None = None
    """Step that the process works on; 0 while it loads."""

    phase: str | None = None
    """Phase of the step, or `load`."""

    micro_batch: int | None = None
    """Micro-batch after which it was taken, counted from 0. None at the end of a phase."""

    allocated_bytes: int = 0
    """Memory in tensors."""

    reserved_bytes: int = 0
    """Memory that torch's allocator holds: tensors and cache."""

    peak_allocated_bytes: int = 0
    """Most memory in tensors since the phase began."""

    peak_reserved_bytes: int = 0
    """Most memory that torch's allocator has held since the phase began."""

    active_bytes: int = 0
    """Memory in tensors, or waiting for a kernel that still uses it."""

    inactive_split_bytes: int = 0
    """Free parts of segments that also hold tensors, which the allocator cannot release. 0 for expandable segments,
    which it can unmap in part."""

    alloc_retries: int = 0
    """Requests since the process started for which the allocator had to release its whole cache."""

    ooms: int = 0
    """Requests since the process started that failed even so."""

    device_free_bytes: int = 0
    """Free memory of the device, all processes together."""

    device_total_bytes: int = 0
    """Memory of the device; 0 for a process without one."""

    outside_torch_bytes: int = 0
    """Memory of the device that the process holds outside torch's allocator: CUDA context, NCCL, libraries."""

    asleep_bytes: int = 0
    """Part of the reserved memory that a sleeping engine gave back to the device; torch does not notice."""

    rss_bytes: int = 0
    """Resident host memory of the process."""

    peak_rss_bytes: int = 0
    """Most resident host memory since the phase began."""

    anonymous_bytes: int = 0
    """Part of the resident memory that is in no file and not shared: memory that only this process can free."""

    host_used_bytes: int = 0
    """Host memory of the container without the page cache, which the kernel drops before it kills a process."""

    host_limit_bytes: int = 0
    """Limit of the container's memory, or the machine's memory if no limit is lower."""

    oom_kills: int = 0
    """Processes of the container that the kernel has killed for its memory."""

    shared_memory_used_bytes: int = 0
    """Memory in use in /dev/shm."""

    shared_memory_bytes: int = 0
    """Size of /dev/shm."""

    @property
    def held_bytes(self) -> int:
        """Memory of the device that torch's allocator holds, without what a sleeping engine gave back."""
        return self.reserved_bytes - self.asleep_bytes

    @property
    def others_bytes(self) -> int:
        """Memory of the device that other processes hold: at the end of an update, a sleeping engine's."""
        used = self.device_total_bytes - self.device_free_bytes
        return max(used - self.held_bytes - self.outside_torch_bytes, 0)

    @property
    def cache_bytes(self) -> int | None:
        """Bytes that are reserved and in no tensor; None if only the memory of tensors is known, as in some logs."""
        cache = self.reserved_bytes - self.allocated_bytes
        return cache if cache >= 0 else None

    def as_line(self) -> dict[str, Any]:
        """JSON values of a line of the memory log. Numbers that are 0 are left out, except for the basic ones."""
        values = ((name, getattr(self, name)) for name in _NAMES)
        return {name: value for name, value in values if value or name in _ALWAYS_WRITTEN}

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> MemorySample | None:
        """The sample in a line of a memory log, also under the names that older logs have (`allocated`, `shm_size`).

        None if the line has no allocated memory. A value of another type is omitted.
        """
        values = {current_name(name): value for name, value in line.items()}
        if not _is_whole_number(values.get("allocated_bytes")):
            return None
        return cls(
            time=finite_seconds(values.get("time")),
            began=finite_seconds(values.get("began")),
            phase=phase if isinstance(phase := values.get("phase"), str) else None,
            **{name: value for name in _WHOLE_NUMBERS if _is_whole_number(value := values.get(name))},
        )


def _is_whole_number(value: Any) -> TypeGuard[int]:
    """True for an integer of 0 or more; JSON's true and false are not numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def current_name(name: str) -> str:
    """The field's name for one that older logs and snapshots have; other names are returned as they are."""
    return _FIELD_OF_OLD_NAME.get(name, name)


def finite_seconds(value: Any) -> float | None:
    """A JSON number as a float; None if it is not finite, too large, or of another type. Python reads NaN in JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST_SECONDS < value < _MOST_SECONDS:
        return None
    return float(value)


_MOST_SECONDS = 1e15
"""Thirty million years: no date has more."""

_NAMES = tuple(field.name for field in fields(MemorySample))
_WHOLE_NUMBERS = tuple(name for name in _NAMES if name not in ("time", "began", "phase"))
_ALWAYS_WRITTEN = frozenset(
    {"time", "began", "step", "phase", "micro_batch"}
    | {"allocated_bytes", "reserved_bytes", "device_total_bytes", "rss_bytes"}
)
_FIELD_OF_OLD_NAME = {
    **{name.removesuffix("_bytes"): name for name in _NAMES if name.endswith("_bytes")},
    "shm_used": "shared_memory_used_bytes",
    "shm_size": "shared_memory_bytes",
}
