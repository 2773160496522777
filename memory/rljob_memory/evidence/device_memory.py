"""The numbers of one GPU at the moment of a failure, as its own process saw them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Another process on the GPU. `pid` is one of the host: inside a pod it names nobody."""

    pid: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes; None where the source does not say.

    `requested`: the request that failed, rounded by the allocator to its segments. `total`, `free`: of the device.
    `allocated`: in tensors. `cached`: reserved by torch's allocator but in no tensor. `process`: of the failing process
    with everything beside torch. `allowed`: a cap that was set on the process. `largest_cached_block`: the largest free
    piece of the cache. `others`: the other processes on the device.
    """

    requested_bytes: int
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    cached_bytes: int | None = None
    process_bytes: int | None = None
    allowed_bytes: int | None = None
    private_pool_bytes: int | None = None
    largest_cached_block_bytes: int | None = None
    others: tuple[GpuProcess, ...] = ()

    @property
    def reserved_bytes(self) -> int | None:
        """What torch's allocator held."""
        if self.allocated_bytes is None or self.cached_bytes is None:
            return None
        return self.allocated_bytes + self.cached_bytes

    @property
    def foreign_bytes(self) -> int:
        """What is neither free nor of the failing process; 0 where that cannot be told."""
        own = self.process_bytes or self.reserved_bytes
        if self.total_bytes is None or self.free_bytes is None or own is None:
            return 0
        return max(self.total_bytes - self.free_bytes - own, 0)

    def numbers(self) -> dict[str, int]:
        """Those that are known, by name."""
        known = {
            "requested_bytes": self.requested_bytes,
            "total_bytes": self.total_bytes,
            "free_bytes": self.free_bytes,
            "allocated_bytes": self.allocated_bytes,
            "reserved_but_unallocated_bytes": self.cached_bytes,
            "process_bytes": self.process_bytes,
            "allowed_bytes": self.allowed_bytes,
            "private_pool_bytes": self.private_pool_bytes,
            "largest_cached_block_bytes": self.largest_cached_block_bytes,
            "other_processes_bytes": self.foreign_bytes or None,
        }
        return {name: value for name, value in known.items() if value is not None}
