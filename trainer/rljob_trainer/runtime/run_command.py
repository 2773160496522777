"""`rljob run`: run a job on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import ValidationError

from rljob_api.exit_codes import ExitCode
from rljob_api.fault_injection import Fault
from rljob_api.job import RLJob, RLJobSpec
from rljob_api.manifest import ManifestDocument, ManifestError, dotted, only_job, read_text
from rljob_api.manifest.unread_fields import unread_fields
from rljob_api.manifest.yaml_document import yaml_text
from rljob_api.memory_plan import MemoryPlan
from rljob_api.topology import Topology, worker_pods
from rljob_client.errors import BadInput, RunError
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import WorkerLost
from rljob_trainer.hardware import Device, this_machine, torch_may_compile, torch_version
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.roles.ray_driver import hide_gpus, local_ray_runs, start_local_ray
from rljob_trainer.roles.warm.start import start_warm
from rljob_trainer.runtime.attempt_plan import Supervision
from rljob_trainer.runtime.job_run import JobRun, changeable_settings, identity
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.stop_request import StopRequest
from rljob_trainer.telemetry.host_memory import host_memory

DeviceChoice = Literal["auto", "cpu", "cuda"]

_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_CPUS_OF_A_PROCESS = 2
"""Ray's logical CPUs for a rank or an engine, with slack. The number of threads is set elsewhere."""
_REQUEST: dict[Topology, str] = {
    "Colocated": "policy.replicas × policy.gpusPerReplica",
    "Disaggregated": "policy.replicas × policy.gpusPerReplica + rollout.replicas × rollout.gpusPerReplica",
}


class InvalidCommandLine(RunError):
    """The command-line options are invalid; nothing was started."""

    exit_code = ExitCode.INVALID_MANIFEST


def run_manifest(
    manifest: Path,
    output: Path | None = None,
    *,
    device: DeviceChoice = "auto",
    faults: Sequence[str] = (),
    plan: Path | None = None,
    report: bool = False,
    settings: Sequence[str] = (),
    quiet: bool = False,
) -> ExitCode:
    """Run the job on this machine, print how it went, and return the exit code.

    `output`: None: runs/NAME-OF-THE-JOB. `faults`: to inject, as `CLASS@PHASE:STEP`. `plan`: JSON file with the initial
    memory plan; None: computed from job and machine. `report`: write the report when the run ends. `settings`: fields
    of the manifest that are set, as `path=value`. `quiet`: print errors only, and not the progress.
    """
    try:
        document = only_job(manifest, settings)
        job = _with_faults(_own_job(document, manifest), faults)
        supervision = Supervision(plan=None if plan is None else _read_plan(plan))
        directory = OutputDirectory(output or Path("runs") / job.metadata.name)
        _print_unread_fields(document, job.spec, device, quiet=quiet)
        with directory.open(_text(document, settings), identity(job), changeable=changeable_settings(job)):
            with closing(LocalPlacement(device)) as placement:
                outcome = JobRun(job, manifest.parent, directory, placement, supervision=supervision, quiet=quiet).run()
            not_written = _report(directory) if report else ExitCode.COMPLETE
    except ManifestError as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    except RunError as error:
        print(f"rljob: {error}", file=sys.stderr)
        return error.exit_code
    if quiet and outcome.exit_code:
        print(f"rljob: {outcome.message}", file=sys.stderr)
    return outcome.exit_code or not_written


def _text(document: ManifestDocument, settings: Sequence[str]) -> str:
    """The manifest with its settings, for `job.yaml`."""
    if not settings:
        return read_text(document.file)
    given = " ".join(f"--set {setting!r}" for setting in settings)
    return f"# {document.file.name} with {given}\n{yaml_text(document.document.data)}"


def _own_job(document: ManifestDocument, manifest: Path) -> RLJob:
    """The job of the manifest. Raises `ManifestError`, also for a job of another trainer."""
    job = document.load()
    if job.spec.trainer is not None:
        message = (
            f"expected RLJob's own trainer, found another, which runs on a cluster only: kubectl apply -f {manifest}"
        )
        raise ManifestError([document.problem(("spec", "trainer"), message)])
    return job


def _print_unread_fields(
    document: ManifestDocument, spec: RLJobSpec, choice: DeviceChoice, *, quiet: bool = False
) -> None:
    """Print the fields that have no effect in this run; if `quiet`, only those that never have one."""
    device: Device | None = None
    with suppress(RunError):  # the placement reports it
        device = this_machine(gpus=choice != "cpu").choose_device(choice)
    for severity, field, message in unread_fields(spec, document.document.data["spec"], device):
        if severity != "note" or not quiet:
            print(document.problem(field, message, severity), file=sys.stderr)


def _with_faults(job: RLJob, faults: Sequence[str]) -> RLJob:
    """`job` with additional faults. Raises `InvalidCommandLine` if the job does not allow faults."""
    if not faults:
        return job
    try:
        given = [Fault.parse(text) for text in faults]
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidCommandLine(f"--fault {problem['input']}: {problem['msg']}") from None
    except ValueError as error:
        raise InvalidCommandLine(f"--fault: {error}") from None
    injection = job.spec.fault_injection
    if not injection.enabled:
        raise InvalidCommandLine(
            "--fault: expected a manifest that allows fault injection, found one that does not; "
            "write faultInjection: {enabled: true} in its spec, or remove --fault"
        )
    changed = injection.model_copy(update={"faults": [*injection.faults, *given]})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"fault_injection": changed})})


def _read_plan(path: Path) -> MemoryPlan:
    try:
        return MemoryPlan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidCommandLine(f"--plan {path}: expected a memory plan as JSON, found: {error.strerror}") from error
    except ValidationError as error:
        first: dict[str, Any] = dict(error.errors(include_url=False)[0])
        where = f"{dotted(first['loc'])}: " if first["loc"] else ""
        raise InvalidCommandLine(
            f"--plan {path}: expected a memory plan as JSON, found: {where}{first['msg']}"
        ) from None


class LocalPlacement:
    """All roles on this machine, in a Ray cluster that belongs to this run."""

    def __init__(self, device_choice: DeviceChoice) -> None:
        self._device_choice = device_choice
        self._hosts: RoleHosts | None = None
        self._ray: dict[str, int] | None = None
        """Arguments with which Ray was started; None: it was not."""
        self._visible_gpus: str | None = None

    def __enter__(self) -> Self:
        self._visible_gpus = os.environ.get(_VISIBLE_GPUS)
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's, by which `this_machine` reads the variable
        device = this_machine(gpus=self._device_choice != "cpu").choose_device(self._device_choice)
        start_warm(("policy", "rollout"), device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not WorkerLost:  # a lost process leaves Ray as it was, for the next attempt
            self.close()
        # The GPUs are hidden from this process while Ray runs; the next attempt needs to see them.
        os.environ.pop(_VISIBLE_GPUS, None)
        if self._visible_gpus is not None:
            os.environ[_VISIBLE_GPUS] = self._visible_gpus

    def close(self) -> None:
        """Stop Ray."""
        if self._ray is not None:
            import ray

            ray.shutdown()
            self._ray = None

    def survey(self, spec: RLJobSpec, _display: RunDisplay, _stop: StopRequest) -> RoleHosts:
        return self.known_hosts(spec)

    def known_hosts(self, spec: RLJobSpec) -> RoleHosts:
        """This machine. Raises `BadInput` if it has fewer GPUs than the job requests."""
        machine = this_machine(gpus=self._device_choice != "cpu")
        device = machine.choose_device(self._device_choice)
        requested = [pods.processes for pods in worker_pods(spec)]
        if device == "cuda" and sum(requested) > len(machine.gpu_memory_bytes):
            or_shrink = "" if spec.recovery.max_gpus is None else ", remove recovery.maxGpus if the policy has grown"
            raise BadInput(
                f"expected {sum(requested)} GPUs ({_REQUEST[spec.topology]}), found "
                f"{len(machine.gpu_memory_bytes)}; lower them{or_shrink}, or use --device cpu"
            )
        bundle = {"CPU": 2, "GPU": 1} if device == "cuda" else {"CPU": 2}
        self._hosts = RoleHosts(
            machine=machine,
            engine_machine=machine,
            device=device,
            ranks=requested[0],
            engine_processes=requested[-1],
            torch_version=torch_version(),
            bundles=(bundle,) * sum(requested),
            shared_memory_bytes=host_memory().shared_memory_bytes,
            may_compile=torch_may_compile(),
        )
        return self._hosts

    def start_ray(self, display: RunDisplay, object_store_bytes: int) -> None:
        assert self._hosts is not None, "survey must be called first"
        wanted = {
            "cpus": _CPUS_OF_A_PROCESS * (self._hosts.ranks + self._hosts.engine_processes),
            "gpus": len(self._hosts.bundles) if self._hosts.device == "cuda" else 0,
            "object_store_bytes": object_store_bytes,
        }
        if self._ray == wanted and local_ray_runs():
            hide_gpus()
            return
        self.close()
        display.phase("starting Ray")
        self._ray = wanted
        start_local_ray(**wanted)

    def oom_kills(self) -> int:
        """OOM kills in the cgroup of this process, which the processes of Ray share."""
        return host_memory().oom_kills


def _report(directory: OutputDirectory) -> ExitCode:
    """Write the report, print its path, and return the exit code."""
    from rljob_client.report import write_report

    try:
        print(write_report(directory.path))
    except RunError as error:
        print(f"rljob: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.COMPLETE
