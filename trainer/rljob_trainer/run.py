"""`rljob run`: from a manifest to an exit code, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_api.manifest import ManifestError, load_manifest
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import BadInput, TrainerError
from rljob_trainer.hardware import this_machine, torch_version
from rljob_trainer.job_run import JobRun, identity
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.role_settings import policy_ranks
from rljob_trainer.roles.placement import RoleHosts
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.stop_request import StopRequest

DeviceChoice = Literal["auto", "cpu", "cuda"]

_CPUS_OF_A_RANK = 4
"""What Ray counts for a rank and its engine, with room to spare: how many threads they use is set elsewhere."""


def run_manifest(manifest: Path, output: Path | None, device: DeviceChoice, *, plot: bool = False) -> ExitCode:
    """Run the job on this machine and tell people how it went; the exit code is the contract's."""
    try:
        job = load_manifest(manifest)
        directory = OutputDirectory(output or Path("runs") / job.metadata.name)
        with directory.open(manifest.read_text(), identity(job)):
            outcome = JobRun(job, manifest, directory, LocalPlacement(job.spec, device)).run()
            if plot:
                _plot(directory)
    except ManifestError as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    except TrainerError as error:
        print(f"rljob: {error}", file=sys.stderr)
        return error.exit_code
    return outcome.exit_code


class LocalPlacement:
    """All roles on this machine, in a Ray of this run's own."""

    def __init__(self, spec: RLJobSpec, device_choice: DeviceChoice) -> None:
        self._spec = spec
        self._device_choice = device_choice
        self._hosts: RoleHosts | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hosts is not None:
            import ray

            ray.shutdown()

    def survey(self, _display: RunDisplay, _stop: StopRequest) -> RoleHosts:
        """This machine. Raises `BadInput` where it has fewer GPUs than the job asks for."""
        machine = this_machine()
        device = machine.choose_device(self._device_choice)
        ranks, gpus = policy_ranks(self._spec.policy), len(machine.gpu_memory_bytes)
        if device == "cuda" and ranks > gpus:
            raise BadInput(
                f"expected {ranks} GPUs (policy.replicas × policy.gpusPerReplica), found {gpus}; "
                "lower them, or use --device cpu"
            )
        bundles = ({"GPU": 1, "CPU": 2},) * ranks if device == "cuda" else None
        self._hosts = RoleHosts(machine, device, ranks, torch_version(), bundles)
        return self._hosts

    def start_ray(self, display: RunDisplay, object_store_bytes: int) -> None:
        assert self._hosts is not None, "survey comes first"
        display.phase("starting Ray")
        start_local_ray(
            cpus=_CPUS_OF_A_RANK * self._hosts.ranks,
            gpus=self._hosts.ranks if self._hosts.device == "cuda" else 0,
            object_store_bytes=object_store_bytes,
        )


def _plot(directory: OutputDirectory) -> None:
    from rljob_trainer.plot import plot_run  # matplotlib takes seconds to import

    for picture in plot_run(directory.path):
        print(picture)
