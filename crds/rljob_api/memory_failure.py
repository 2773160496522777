"""MemoryFailure: the account that a process gives of its own out-of-memory failure, in numbers.

The trainer and the probe build it in the process that fails, and write it as JSON: in the run's directory, in a
termination message, in a StepReport. It is bounded, so that it fits there.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field

from rljob_api.api_model import ATOMIC, ApiModel, Count, Timestamp
from rljob_api.plan_change import Phase, Role

MAX_SAMPLES_KEPT = 32
MAX_PROCESSES_NAMED = 16
MAX_NAME_LENGTH = 64
MAX_FRAMES_KEPT = 16
MAX_FRAME_LENGTH = 128
MAX_FAILURE_TEXT_LENGTH = 1024

Frame = Annotated[str, Field(max_length=MAX_FRAME_LENGTH)]
"""A frame of a stack, as `file in function`."""

ProcessName = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
"""Name of a program, which the kernel cuts after 15 characters."""


class _Described(StrEnum):
    """Values, each with its meaning in one clause."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        assert meaning, "each member has one; a value alone names a member"
        member.meaning = meaning
        return member


class FailureKind(_Described):
    """The memory that ran out, and the program that requested it. The cause is diagnosed separately."""

    ALLOCATOR = "Allocator", "torch's allocator could not get GPU memory"
    DRIVER = "Driver", "the GPU had no memory left"
    FRAGMENTED = "Fragmented", "no piece of the allocator's free GPU memory was large enough"
    COMPILED = "Compiled", "a compiled program needs more memory than the device has"
    MATH_LIBRARY = "MathLibrary", "cuBLAS or cuDNN could not get GPU memory"
    NCCL = "Nccl", "NCCL could not get GPU memory"
    ENGINE_WAKE = "EngineWake", "the engine could not map its memory when it woke"
    ENGINE_SLEEP = "EngineSleep", "memory in use grew while the engine went to sleep"
    ENGINE_START = "EngineStart", "less GPU memory was free than the engine's configured share"
    ENGINE_PROFILING = "EngineProfiling", "memory changed while the engine measured it"
    ENGINE_UNBALANCED = "EngineUnbalanced", "one GPU had less free memory than the others when the engine started"
    ENGINE_WARM_UP = "EngineWarmUp", "the engine ran out of memory during its warm-up"
    KV_CACHE_TOO_SMALL = "KVCacheTooSmall", "the engine's budget leaves too little for its KV cache"
    HOST = "Host", "the host or the container ran out of memory"
    KILLED = "Killed", "a process was killed by SIGKILL"
    LOST = "Lost", "a process of Ray was lost, for one of several reasons"
    SHARED_MEMORY = "SharedMemory", "/dev/shm is full"
    SHARED_SEGMENT = "SharedSegment", "NCCL could not create a segment in /dev/shm"
    SEMAPHORE = "Semaphore", "a semaphore could not be created in /dev/shm"
    BUS_ERROR = "BusError", "a process died of a bus error"
    OBJECT_STORE = "ObjectStore", "Ray's object store is full"
    LIMIT = "Limit", "a limit on the process's GPU memory was reached"
    NO_MESSAGE = "NoMessage", "a process exited with an out-of-memory code and without a message"
    UNFAMILIAR = "Unfamiliar", "a program reported a shortage of memory"


class Activity(_Described):
    """The work of a process at the moment of a failure. Its meaning is worded to follow `during`."""

    WAKE = "WakeUp", "waking the engine up"
    SLEEP = "Sleep", "putting the engine to sleep"
    PINNING = "Pinning", "pinning host memory"
    OPTIMIZER = "OptimizerStep", "the optimizer's step"
    WEIGHT_SYNC = "WeightSync", "the weight sync"
    GATHERING = "Gathering", "gathering the full parameters"
    CHECKPOINT = "Checkpoint", "saving a checkpoint"
    MODEL_LOAD = "ModelLoad", "loading the model"
    KV_CACHE = "KVCache", "allocating the KV cache"
    ENGINE_PROFILING = "EngineProfiling", "the engine's profiling pass"
    ENGINE_WARM_UP = "EngineWarmUp", "the engine's warm-up"
    GRAPH_CAPTURE = "GraphCapture", "capturing CUDA graphs"
    SAMPLING = "Sampling", "sampling"
    LOGITS = "Logits", "computing logits or log-probabilities"
    BACKWARD = "Backward", "the backward pass"
    ENGINE_STEP = "EngineStep", "a step of the engine"
    GENERATION = "Generation", "generation"
    COLLECTING = "Collecting", "collecting the results of batches"
    FORWARD = "Forward", "the forward pass"


_SAME = 0.005
"""Most difference between equal sizes, which messages print with two decimals."""
_NOTABLE = 0.1
"""Smallest share of the GPU of tensors that a request of the same size may copy."""


class GpuProcess(ApiModel):
    """Another process on the GPU."""

    pid: Count
    """Process id of the host. Inside a pod it names no process."""

    used_bytes: Count
    """GPU memory of the process."""

    name: ProcessName = ""
    """Name of the program. Empty: unknown."""


class DeviceMemory(ApiModel):
    """Memory of one GPU at the moment of a failure, as its own process saw it. A number that is unknown is absent."""

    requested_bytes: Count
    """The request that failed, rounded by the allocator to its segments."""

    gpu: Count | None = None
    """Index of the GPU in the process."""

    total_bytes: Count | None = None
    """Memory of the GPU."""

    free_bytes: Count | None = None
    """Free memory of the GPU, counting all processes."""

    allocated_bytes: Count | None = None
    """Memory in tensors."""

    cached_bytes: Count | None = None
    """Memory that torch's allocator has reserved and that is in no tensor."""

    process_bytes: Count | None = None
    """Memory of the failing process, with everything outside torch."""

    allowed_bytes: Count | None = None
    """Limit that was set on the process. Absent: none."""

    private_pool_bytes: Count | None = None
    """Memory in private pools, such as those of CUDA graphs."""

    largest_cached_block_bytes: Count | None = None
    """Largest free piece of the cache."""

    others: list[GpuProcess] = Field(default_factory=list, max_length=MAX_PROCESSES_NAMED, json_schema_extra=ATOMIC)
    """Other processes on the GPU, as far as they are known."""

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
        return (self.free_bytes or 0) - self.requested_bytes >= max(1 << 28, self.requested_bytes // 10)

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


class EngineMemory(ApiModel):
    """The inference engine in the failing process, or next to it."""

    in_process: bool = False
    """True if it runs in the failing process."""

    asleep: bool = False
    """True if it slept."""

    kv_cache_bytes: Count | None = None
    """Size of its KV cache. Absent: unknown."""

    weights_bytes: Count | None = None
    """Size of its weights. Absent: unknown."""


class HostUse(ApiModel):
    """Host memory of the failing process's container."""

    used_bytes: Count = 0
    """Memory in use, without memory that the kernel can reclaim. 0: unknown."""

    limit_bytes: Count = 0
    """Memory limit. 0: unknown, or none."""

    oom_kills: Count = 0
    """Processes that the kernel's out-of-memory killer has killed."""

    shared_memory_used_bytes: Count = 0
    """Memory in use in /dev/shm."""

    shared_memory_bytes: Count = 0
    """Size of /dev/shm. 0: unknown."""


class StepMemory(ApiModel):
    """Memory of torch's allocator after a step."""

    allocated_bytes: Count
    """Memory in tensors."""

    reserved_bytes: Count
    """Memory that torch's allocator has reserved."""


class MemoryFailure(ApiModel):
    """One out-of-memory failure, as the failing process knows it. A number that is unknown is absent."""

    kind: FailureKind
    """Memory that ran out, and the program that requested it."""

    text: str = Field(default="", max_length=MAX_FAILURE_TEXT_LENGTH)
    """Message of the error, shortened. For people; no number in it is read again."""

    time: Timestamp | None = None
    """Time of the failure."""

    role: Role | None = None
    """Role of the process: controller, policy or rollout."""

    rank: Count | None = None
    """Number of the process within its role, from 0."""

    step: Count | None = None
    """Step of the failure."""

    phase: Phase | None = None
    """Phase of the failure."""

    micro_batch: Count | None = None
    """Micro-batch of the failure, within an update."""

    activity: Activity | None = None
    """Work of the process, set by markers in its code, else found by the names in its stack."""

    stack: list[Frame] = Field(default_factory=list, max_length=MAX_FRAMES_KEPT, json_schema_extra=ATOMIC)
    """Innermost frames of a process without markers, as `file in function`, the outermost first."""

    device: DeviceMemory | None = None
    """Memory of the GPU. Absent: unknown, or no GPU ran out."""

    sizes: Annotated[dict[Annotated[str, Field(max_length=MAX_NAME_LENGTH)], Count], Field(max_length=8)] = Field(
        default_factory=dict
    )
    """Other sizes that the error names, in bytes: the share that an engine wanted, the use and the limit of a
    container."""

    engine: EngineMemory | None = None
    """The engine on the GPU. Absent: there is none, or nothing is known of it."""

    siblings: Annotated[list[ProcessName], Field(max_length=MAX_PROCESSES_NAMED)] | None = Field(
        default=None, json_schema_extra=ATOMIC
    )
    """Names of the other processes of the container that have a GPU open. Absent: unknown."""

    host: HostUse | None = None
    """Host memory of the container."""

    samples: list[StepMemory] = Field(default_factory=list, max_length=MAX_SAMPLES_KEPT, json_schema_extra=ATOMIC)
    """Memory after the last steps, the latest one last."""

    @property
    def requested_bytes(self) -> int | None:
        """The request that failed, if it is known."""
        return self.device.requested_bytes if self.device else self.sizes.get("wanted_bytes")
