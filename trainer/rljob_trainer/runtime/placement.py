"""Where the roles of a job run: on this machine, or in the worker pods of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.hardware import Bundle, Device, Machine
from rljob_trainer.runtime.stop_request import StopRequest


@dataclass(frozen=True, slots=True)
class RoleHosts:
    """What there is for the roles.

    `machine`: all that the roles share among them, over all workers. `ranks`: policy ranks, and as many engines.
    `bundles[r]`: what rank r and engine r ask Ray for; None where they may run anywhere. `shared_memory_bytes`: of the
    smallest /dev/shm. `may_compile`: whether torch may, wherever a role runs.
    """

    machine: Machine
    device: Device
    ranks: int
    torch_version: str
    bundles: tuple[Bundle, ...] | None
    shared_memory_bytes: int
    may_compile: bool

    @property
    def layers_compiled(self) -> bool:
        """Whether the policy's layers become few kernels, which keep less for the backward pass: on GPUs."""
        return self.device == "cuda" and self.may_compile


class Placement(Protocol):
    """In order: entered, `survey`, `start_ray`, left. Ray ends, and the roles with it, when it is left.

    It can be entered again then, for another attempt.
    """

    def __enter__(self) -> Self:
        """Begin with what takes time and needs nothing of the job."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def survey(self, display: RunDisplay, stop: StopRequest) -> RoleHosts:
        """Wait until what the job asks for is there, and say what it is.

        Raises a `TrainerError` where it is not what the job asks for, `StopNow` where a stop is asked for meanwhile.
        """

    def start_ray(self, display: RunDisplay, object_store_bytes: int) -> None:
        """See to it that Ray is up, with at least so much shared memory wherever a role may run."""

    def kills_by_the_kernel(self) -> int:
        """How many processes the kernel has killed for their memory, ever, where the roles run; 0 where nobody says."""
