"""The machines that host the roles of a job: this one, or the worker pods of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rljob_api.job import RLJobSpec
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.hardware import Bundle, Device, Machine
from rljob_trainer.runtime.stop_request import StopRequest


@dataclass(frozen=True, slots=True)
class RoleHosts:
    """The resources that the roles can use."""

    machine: Machine
    """All resources of the policy, over all workers."""

    engine_machine: Machine
    """Those of the engines; the same unless the engines have pods of their own."""

    device: Device

    ranks: int
    """Number of policy ranks."""

    engine_processes: int
    """Number of processes of engines. Colocated: as many as ranks."""

    torch_version: str

    bundles: tuple[Bundle, ...]
    """Bundles of `RoleSettings`."""

    shared_memory_bytes: int
    """Size of the smallest /dev/shm."""

    may_compile: bool
    """False if torch.compile is disabled on any host."""

    @property
    def layers_compiled(self) -> bool:
        """True if the policy's layers are compiled, on GPUs: fused kernels save fewer activations."""
        return self.device == "cuda" and self.may_compile


class Placement(Protocol):
    """Starts and stops Ray for an attempt. Call order: `__enter__`, `survey`, `start_ray`, `__exit__`.

    The roles have ended when the context is left, which stops Ray, or leaves it for another attempt. It can then be
    entered again.
    """

    def __enter__(self) -> Self:
        """Begin slow preparations that do not depend on the job."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def known_hosts(self, spec: RLJobSpec) -> RoleHosts | None:
        """Result of `survey` if the resources are known without waiting; otherwise None. It may be called at any
        time."""

    def survey(self, spec: RLJobSpec, display: RunDisplay, stop: StopRequest) -> RoleHosts:
        """Wait for the resources that `spec`, with the policy's size in the attempt, requests, and return them.

        Raises a `RunError` if they do not meet the request, `StopNow` if a stop is requested during the wait.
        """

    def start_ray(self, display: RunDisplay, object_store_bytes: int) -> None:
        """Ensure that Ray runs, with an object store of at least this size on every host."""

    def oom_kills(self) -> int:
        """Number of processes that the kernel has OOM-killed on the hosts so far; 0 if unknown."""
