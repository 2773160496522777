"""An out-of-memory failure as a reader found it: the account of its process, or the facts that text shows."""

from __future__ import annotations

from typing import Self

from rljob_api.memory_failure import Activity, DeviceMemory, FailureKind, GpuProcess, MemoryFailure
from rljob_memory.hardware import GPU_TYPES

__all__ = ["KUBELETS_REPORT", "DeviceMemory", "Failure", "FailureKind", "GpuProcess"]

KUBELETS_REPORT = ".ended.log"
"""End of the name of a file with the kubelet's report of how a container ended."""

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
_REQUESTS_FOR_THE_GPU = frozenset(
    {FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.FRAGMENTED, FailureKind.COMPILED}
)
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
_LARGEST_GPU_BYTES = max(kind.memory_bytes for kind in GPU_TYPES.values())


class Failure(MemoryFailure):
    """A failure with the place where it was found."""

    is_structured: bool = False
    """True if its process wrote the numbers; False if they are read from text."""

    steps_done: int | None = None
    """Steps that the process completed before it, if they can be counted."""

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
        if self.kind is not FailureKind.UNFAMILIAR:
            return self.kind in _REQUESTS_FOR_THE_GPU
        return self.activity in _ACTIVITIES_ON_THE_GPU if self.of_the_gpu is None else self.of_the_gpu

    @property
    def exceeds_every_gpu(self) -> bool:
        """True if one request is larger than the memory of every known GPU."""
        return (self.requested_bytes or 0) > _LARGEST_GPU_BYTES

    @property
    def in_engine(self) -> bool:
        """True if the failing process is an engine, not the policy."""
        return (
            self.role == "rollout"
            or self.kind in _ENGINE_KINDS
            or self.activity in _ENGINE_ACTIVITIES
            or self.phase == "rollout"
        )

    @property
    def is_of_the_kubelet(self) -> bool:
        """True if the kubelet reported it."""
        return self.source.endswith(KUBELETS_REPORT)

    def changed(self, **values: object) -> Self:
        """This failure with other values."""
        return self.model_copy(update=values)
