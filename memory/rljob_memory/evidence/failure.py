"""One out-of-memory failure: its kind, the numbers of its message, and the place where it happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rljob_memory.evidence.activity import Activity
from rljob_memory.sizes import GIB


class FailureKind(StrEnum):
    """The memory that ran out, and the program that requested it. The cause is diagnosed separately."""

    ALLOCATOR = "Allocator"
    DRIVER = "Driver"
    FRAGMENTED = "Fragmented"
    COMPILED = "Compiled"
    MATH_LIBRARY = "MathLibrary"
    NCCL = "Nccl"
    ENGINE_WAKE = "EngineWake"
    ENGINE_SLEEP = "EngineSleep"
    ENGINE_START = "EngineStart"
    ENGINE_PROFILING = "EngineProfiling"
    ENGINE_UNBALANCED = "EngineUnbalanced"
    ENGINE_WARM_UP = "EngineWarmUp"
    KV_CACHE_TOO_SMALL = "KVCacheTooSmall"
    HOST = "Host"
    KILLED = "Killed"
    LOST = "Lost"
    SHARED_MEMORY = "SharedMemory"
    SHARED_SEGMENT = "SharedSegment"
    SEMAPHORE = "Semaphore"
    BUS_ERROR = "BusError"
    OBJECT_STORE = "ObjectStore"
    LIMIT = "Limit"
    NO_MESSAGE = "NoMessage"
    UNFAMILIAR = "Unfamiliar"

    @property
    def meaning(self) -> str:
        """The kind in one clause."""
        return _MEANING[self]


_MEANING = {
    FailureKind.ALLOCATOR: "torch's allocator could not get GPU memory",
    FailureKind.DRIVER: "the CUDA driver had no GPU memory left",
    FailureKind.FRAGMENTED: "no piece of the allocator's free GPU memory was large enough",
    FailureKind.COMPILED: "a compiled program needs more memory than the device has",
    FailureKind.MATH_LIBRARY: "cuBLAS or cuDNN could not get GPU memory",
    FailureKind.NCCL: "NCCL could not get GPU memory",
    FailureKind.ENGINE_WAKE: "the engine could not map its memory when it woke",
    FailureKind.ENGINE_SLEEP: "memory in use grew while the engine went to sleep",
    FailureKind.ENGINE_START: "less GPU memory was free than the engine's configured share",
    FailureKind.ENGINE_PROFILING: "memory changed while the engine measured it",
    FailureKind.ENGINE_UNBALANCED: "one GPU had less free memory than the others when the engine started",
    FailureKind.ENGINE_WARM_UP: "the engine ran out of memory during its warm-up",
    FailureKind.KV_CACHE_TOO_SMALL: "the engine's budget leaves too little for its KV cache",
    FailureKind.HOST: "the host or the container ran out of memory",
    FailureKind.KILLED: "a process was killed by SIGKILL",
    FailureKind.LOST: "a process of Ray was lost, for one of several reasons",
    FailureKind.SHARED_MEMORY: "/dev/shm is full",
    FailureKind.SHARED_SEGMENT: "NCCL could not create a segment in /dev/shm",
    FailureKind.SEMAPHORE: "a semaphore could not be created in /dev/shm",
    FailureKind.BUS_ERROR: "a process died of a bus error",
    FailureKind.OBJECT_STORE: "Ray's object store is full",
    FailureKind.LIMIT: "a limit on the process's GPU memory was reached",
    FailureKind.NO_MESSAGE: "a process exited with an out-of-memory code and without a message",
    FailureKind.UNFAMILIAR: "a program reported a shortage of memory",
}


_LARGER_THAN_GPUS_BYTES = 160 * GIB
_SAME = 0.005
"""Most difference between equal sizes, which messages print with two decimals."""
_NOTABLE = 0.1


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Another process on the GPU."""

    pid: int
    """Process id of the host. Inside a pod it names no process."""

    used_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one GPU at the moment of a failure, as its own process saw it. None if the source does not name it."""

    requested_bytes: int
    """The request that failed, rounded by the allocator to its segments."""

    gpu: int | None = None

    total_bytes: int | None = None
    """Memory of the device."""

    free_bytes: int | None = None
    """Free memory of the device."""

    allocated_bytes: int | None = None
    """Memory in tensors."""

    cached_bytes: int | None = None
    """Memory that torch's allocator has reserved and that is in no tensor."""

    process_bytes: int | None = None
    """Memory of the failing process, with everything beside torch."""

    allowed_bytes: int | None = None
    """A cap that was set on the process."""

    private_pool_bytes: int | None = None
    """Memory in private pools, such as those of CUDA graphs."""

    largest_cached_block_bytes: int | None = None
    """Largest free piece of the cache."""

    others: tuple[GpuProcess, ...] = ()
    """The other processes on the device."""

    @property
    def reserved_bytes(self) -> int | None:
        """Memory that torch's allocator held."""
        if self.allocated_bytes is None or self.cached_bytes is None:
            return None
        return self.allocated_bytes + self.cached_bytes

    @property
    def had_room(self) -> bool:
        """True if the request was refused although twice as much was free, beyond any rounding, and no cap was set."""
        return self.allowed_bytes is None and (self.free_bytes or 0) >= 2 * max(self.requested_bytes, 1)

    @property
    def had_enough_free(self) -> bool:
        """True if the request was refused although clearly more was free: then nobody else took its memory."""
        return (self.free_bytes or 0) - self.requested_bytes >= max(GIB // 4, self.requested_bytes // 10)

    @property
    def asks_for_a_copy(self) -> bool:
        """True if one request is as large as all tensors, and those take a tenth of the device."""
        held = self.allocated_bytes or 0
        alike = abs(self.requested_bytes - held) <= _SAME * held
        return bool(self.total_bytes) and alike and held >= _NOTABLE * (self.total_bytes or 0)

    @property
    def asleep_bytes(self) -> int:
        """Memory that torch counts and the process does not have: that of an engine that sleeps in the process."""
        if self.process_bytes is None or self.reserved_bytes is None:
            return 0
        return max(self.reserved_bytes - self.process_bytes, 0)

    @property
    def own_cache_bytes(self) -> int:
        """torch's cache, as far as the process has it: memory of a sleeping engine may be counted as cache too."""
        return max((self.cached_bytes or 0) - self.asleep_bytes, 0)

    @property
    def foreign_bytes(self) -> int:
        """Memory that is neither free nor of the failing process; 0 if unknown."""
        own = self.process_bytes or self.reserved_bytes
        if self.total_bytes is None or self.free_bytes is None or own is None:
            return 0
        return max(self.total_bytes - self.free_bytes - own, 0)

    def numbers(self) -> dict[str, int]:
        """The known numbers, by name."""
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


_OF_THE_GPU = frozenset({FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.FRAGMENTED, FailureKind.COMPILED})
_ENGINE_ACTIVITIES = frozenset(
    {
        Activity.WAKE,
        Activity.KV_CACHE,
        Activity.ENGINE_PROFILING,
        Activity.ENGINE_WARM_UP,
        Activity.GRAPH_CAPTURE,
        Activity.ENGINE_STEP,
    }
)
_ACTIVITIES_ON_THE_GPU = frozenset(
    {
        Activity.FORWARD,
        Activity.BACKWARD,
        Activity.LOGITS,
        Activity.SAMPLING,
        Activity.KV_CACHE,
        Activity.GRAPH_CAPTURE,
        Activity.OPTIMIZER,
        Activity.WEIGHT_SYNC,
        Activity.WAKE,
    }
)
_ENGINE_KINDS = frozenset(
    {
        FailureKind.ENGINE_WAKE,
        FailureKind.ENGINE_SLEEP,
        FailureKind.ENGINE_START,
        FailureKind.ENGINE_PROFILING,
        FailureKind.ENGINE_UNBALANCED,
        FailureKind.ENGINE_WARM_UP,
        FailureKind.KV_CACHE_TOO_SMALL,
    }
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure as an exception, a log, a report or a snapshot shows it."""

    kind: FailureKind

    text: str = ""
    """The message, shortened."""

    device: DeviceMemory | None = None
    """Memory of the GPU, if the message or snapshot of torch's allocator names it."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Other sizes in the message, by name."""

    activity: Activity | None = None
    """Activity of the program, from its stack."""

    role: str | None = None
    rank: int | None = None
    step: int | None = None
    steps_done: int | None = None
    """Steps that the process completed before it, if they can be counted."""
    phase: str | None = None
    micro_batch: int | None = None

    clock: tuple[str, float] | None = None
    """Format of its time stamp, and seconds that are comparable within the format: since the epoch for `epoch`."""

    source: str = ""
    """File in which it was found."""

    retried: bool = False
    """The program reported another try with less memory just below."""

    unless: tuple[str, ...] = ()
    """Names of lines that explain it without a shortage of memory."""

    of_the_gpu: bool | None = None
    """True or False if the words of an unfamiliar report name the GPU's memory or the host's."""

    @property
    def is_of_the_gpu(self) -> bool:
        """True if a request of a program for GPU memory failed, also if only its words name the GPU."""
        if self.kind is FailureKind.UNFAMILIAR:
            return self.activity in _ACTIVITIES_ON_THE_GPU if self.of_the_gpu is None else self.of_the_gpu
        return self.kind in _OF_THE_GPU

    @property
    def requested_bytes(self) -> int | None:
        """The request that failed, if the message names it."""
        return self.device.requested_bytes if self.device else self.sizes.get("wanted_bytes")

    @property
    def exceeds_every_gpu(self) -> bool:
        """True if one request is larger than the memory of nearly all GPUs."""
        return (self.requested_bytes or 0) >= _LARGER_THAN_GPUS_BYTES

    @property
    def in_engine(self) -> bool:
        """True if the failing process is an engine, not the policy."""
        return (
            self.role == "rollout"
            or self.kind in _ENGINE_KINDS
            or self.activity in _ENGINE_ACTIVITIES
            or self.phase == "rollout"
        )
