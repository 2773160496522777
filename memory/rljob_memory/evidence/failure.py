"""One out-of-memory failure as it was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.device_memory import DeviceMemory


class FailureKind(StrEnum):
    """Who ran out of what. The class of the cause is another question."""

    ALLOCATOR = "torch's allocator got no memory of the GPU"
    DRIVER = "the CUDA driver had no memory of the GPU"
    MATH_LIBRARY = "cuBLAS or cuDNN got no memory of the GPU"
    NCCL = "NCCL got no memory of the GPU"
    ENGINE_WAKE = "the engine could not map its memory again after its sleep"
    ENGINE_SLEEP = "memory in use grew while the engine went to sleep"
    ENGINE_START = "less memory was free than the engine is to take"
    ENGINE_PROFILING = "memory changed while the engine measured it"
    ENGINE_WARM_UP = "the engine ran out of memory warming up"
    KV_CACHE_TOO_SMALL = "the engine's budget leaves too little for its KV cache"
    HOST = "the host, or the container, ran out of memory"
    KILLED = "a process was killed by SIGKILL"
    SHARED_MEMORY = "/dev/shm is full"
    SHARED_SEGMENT = "NCCL could not make a segment in /dev/shm"
    BUS_ERROR = "a process died of a bus error"
    OBJECT_STORE = "Ray's object store is full"
    UNSAID = "a process ended by an out-of-memory exit code and left no message"


_ENGINE_ACTIVITIES = frozenset({Activity.WAKE, Activity.KV_CACHE, Activity.ENGINE_WARM_UP, Activity.GENERATION})
_ENGINE_KINDS = frozenset(
    {
        FailureKind.ENGINE_WAKE,
        FailureKind.ENGINE_SLEEP,
        FailureKind.ENGINE_START,
        FailureKind.ENGINE_PROFILING,
        FailureKind.ENGINE_WARM_UP,
        FailureKind.KV_CACHE_TOO_SMALL,
    }
)


@dataclass(frozen=True, slots=True)
class Failure:
    """`text`: the message, shortened. `sizes`: other bytes that it names. `role`, `rank`, `step`, `phase`,
    `micro_batch`: where it happened, as far as that is known. `activity`: what the traceback says was going on.
    `clock`: its time stamp's format and seconds, comparable within a format. `source`: file it was found in.
    """

    kind: FailureKind
    text: str = ""
    device: DeviceMemory | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    activity: Activity | None = None
    role: str | None = None
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    micro_batch: int | None = None
    clock: tuple[str, float] | None = None
    source: str = ""

    @property
    def in_engine(self) -> bool:
        """Whether the failing process is an engine, not the policy."""
        return (
            self.role == "rollout"
            or self.kind in _ENGINE_KINDS
            or self.activity in _ENGINE_ACTIVITIES
            or self.phase == "rollout"
        )
