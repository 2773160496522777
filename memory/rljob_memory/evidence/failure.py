"""An out-of-memory failure as a reader found it: the account of its process, or what a text shows of it."""

from __future__ import annotations

from typing import Self

from rljob_api.memory_failure import DeviceMemory, FailureKind, GpuProcess, MemoryFailure

__all__ = ["KUBELETS_REPORT", "DeviceMemory", "Failure", "FailureKind", "GpuProcess"]

KUBELETS_REPORT = ".ended.log"
"""End of the name of a file with the kubelet's report of how a container ended."""


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
        if self.kind is FailureKind.UNFAMILIAR and self.of_the_gpu is not None:
            return self.of_the_gpu
        return super().is_of_the_gpu

    @property
    def is_of_the_kubelet(self) -> bool:
        """True if the kubelet reported it."""
        return self.source.endswith(KUBELETS_REPORT)

    def changed(self, **values: object) -> Self:
        """This failure with other values."""
        return self.model_copy(update=values)
