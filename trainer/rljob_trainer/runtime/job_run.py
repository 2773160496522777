"""A job in an output directory, attempt after attempt, up to its outcome.

The same code runs on one machine and in pods. The differences are where the roles run (`Placement`), who receives
reports (`RunListener`), and who starts attempts (`Supervision`).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from rljob_api.algorithms import ALGORITHMS
from rljob_api.bounds import storable
from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob, grown_job
from rljob_api.step_report import Evidence
from rljob_client.errors import BadInput, OutputUnavailable, RunError
from rljob_client.run_directory.durable_files import disk_full_message, is_disk_full, write_atomically
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.summary import Summary, summarize
from rljob_memory.recovery import Constraints, GiveUp, GiveUpReason, RecoveryState, Response, Restart, respond
from rljob_memory.recovery.constraints import within_max_gpus
from rljob_trainer.display.log_routing import crash_report, route_library_logs
from rljob_trainer.display.run_display import RunDisplay, plain_console
from rljob_trainer.display.summary_table import print_summary
from rljob_trainer.errors import WorkerLost
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.recovery.plan_changes import state_at_start
from rljob_trainer.recovery.recovery import NewAttempt, failure_report
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.attempt import Attempt
from rljob_trainer.runtime.attempt_plan import Supervision
from rljob_trainer.runtime.placement import Placement
from rljob_trainer.runtime.stop_request import StopRequest, stop_on_signals
from rljob_trainer.trackers.run_listeners import run_listeners

log = structlog.get_logger()


def identity(job: RLJob) -> dict[str, Any]:
    """The settings that must not change between runs in one output directory: all that determine the weights.

    Settings of model, task and algorithm with their default value are left out, so that a later version can add some.
    """
    left_out: dict[str, set[str]] = {
        "model": {"cache"},
        "task": {"files", "on_reward_error", "reward_timeout_seconds"},
        "algorithm": set() if job.spec.algorithm.rate_depends_on_steps else {"steps"},
    }
    algorithm, defaults = job.spec.algorithm, ALGORITHMS[job.spec.algorithm.name].defaults
    written = [each.name for each in fields(defaults) if getattr(algorithm, each.name) == getattr(defaults, each.name)]
    spec = job.spec.model_copy(update={"algorithm": algorithm.model_copy(update=dict.fromkeys(written))})
    dump = partial(spec.model_dump, mode="json", by_alias=True)
    settings = dump(include=set(left_out), exclude=left_out, exclude_defaults=True)
    if job.spec.evaluation is not None and job.spec.evaluation.held_out:
        settings |= dump(include={"evaluation": {"held_out"}})
    settings |= dump(
        include={"policy": {"optimizer": {"moments"}, "lora": True}},
        exclude={"policy": {"lora": {"export"}}},
        exclude_none=True,
    )
    return {name: section for name, section in settings.items() if section}


def changeable_settings(job: RLJob) -> frozenset[str]:
    """Settings of `identity` that may change nevertheless.

    Every committed prompt is within the limit, so a higher limit changes no committed step. If longer prompts are
    skipped, however, it would change the order of the others.
    """
    return frozenset({"algorithm.maxPromptTokens"} if job.spec.task.overlong_prompts == "Fail" else ())


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    exit_code: ExitCode

    message: str
    """The outcome, and what to do."""

    steps: int
    """Committed steps, over all attempts."""

    error: RunError | None = None
    """The error that ended the last attempt."""

    evidence: Evidence | None = None
    """Set if that error was an out-of-memory failure."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", storable(self.message))  # it quotes paths and errors


@dataclass(slots=True)
class JobRun:
    """Runs the attempts of a job, in an output directory that is open for it."""

    job: RLJob
    task_directory: Path
    """Directory of the task's files and Python modules."""
    directory: OutputDirectory
    """Open for the job."""
    placement: Placement
    listener: RunListener = field(default_factory=RunListener)

    mounted_model: Path | None = None
    """Volume in a pod that holds the model of an `oci://` or `pvc://` URI."""

    supervision: Supervision = field(default_factory=Supervision)

    resume_hint: str = "To resume at step {step}, run the same command again."
    """Advice to resume a stopped run, with a placeholder `{step}`."""

    export_hint: str = "To write the model, run the same command again."
    """The same if all steps are committed."""

    quiet: bool = False
    """Print nothing on the terminal."""

    def run(self) -> Outcome:
        """Run until the job is complete, a signal stops it, or it fails for good.

        Writes a summary. That of a complete run stays if nothing was added to the run, as by a command that is refused.
        """
        with Ledger(self.directory.ledger) as ledger:
            records_before = len(ledger.records)
            with route_library_logs(self.directory.controller_log, self.job.metadata.name) as terminal:
                console = plain_console(terminal, quiet=self.quiet)
                if self._is_finished(ledger):
                    further = f"raise algorithm.steps above {ledger.last_step} to train further"
                    outcome = Outcome(ExitCode.COMPLETE, f"already complete; {further}", steps=ledger.last_step)
                else:
                    console.print(f"library logs: {self.directory.logs}", style="dim", markup=False)
                    display = RunDisplay(console, self.job.metadata.name, self.job.spec.algorithm.steps, ledger.steps)
                    listeners = run_listeners(self.job, self.directory.path, ledger.records, self.listener, display)
                    with display, stop_on_signals(display.note) as stop, listeners as listener:
                        outcome = self._attempts(ledger, listener, display, stop)
                        listener.finished(self._summary(ledger, outcome))
            if len(ledger.records) > records_before or not self._has_complete_summary():
                outcome = self._write_summary(ledger, outcome)
            with suppress(OSError, SystemExit):  # the terminal is gone; rich exits if it was a pipe
                console = plain_console(quiet=self.quiet)
                print_summary(self._summary(ledger, outcome), console, self.directory.path)
        return outcome

    def _has_complete_summary(self) -> bool:
        try:
            return bool(json.loads(self.directory.summary.read_bytes())["status"] == "Complete")
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def _write_summary(self, ledger: Ledger, outcome: Outcome) -> Outcome:
        """Write `summary.json`. Returns the outcome, which a write that fails changes if all else was complete."""
        try:
            write_atomically(self.directory.summary, self._summary(ledger, outcome).to_json())
        except OutputUnavailable as error:
            if outcome.exit_code == ExitCode.COMPLETE:
                return Outcome(error.exit_code, str(error), ledger.last_step, error)
        return outcome

    def _attempts(self, ledger: Ledger, listener: RunListener, display: RunDisplay, stop: StopRequest) -> Outcome:
        """Run attempts until one ends the job."""
        spec = self.job.spec
        constraints = Constraints(spec.memory, spec.recovery, None, self.supervision.levels)
        state = RecoveryState(None, spec.algorithm.steps)
        while True:
            state = replace(state, first_step=ledger.next_step)
            try:
                return self._attempt(ledger, listener, display, stop)
            except NewAttempt:
                log.info("starting a new attempt under the changed memory plan")
                display.note("starting a new attempt under the changed memory plan")
            except RunError as error:
                log.exception("the attempt failed")
                report = failure_report(error, len(ledger.attempts) or 1, datetime.now(UTC))
                answer = respond(report, replace(state, committed_step=ledger.last_step), constraints)
                if stop or not isinstance(answer, Restart):
                    return self._failed(ledger, error, answer)
                state = answer.state
                display.warning(f"Restarting: {answer.message}")

    def _attempt(self, ledger: Ledger, listener: RunListener, display: RunDisplay, stop: StopRequest) -> Outcome:
        """Run one attempt. Raises errors that another attempt may resolve."""
        recovery_state = self._recovery_state(ledger)
        attempt = Attempt(
            grown_job(self.job, recovery_state.plan),
            self.task_directory,
            self.directory,
            self.placement,
            self.supervision,
            listener,
            self.mounted_model,
            ledger,
            display,
            stop,
            recovery_state,
        )
        try:
            with stop.at_once():
                attempt.run()
        except RunError as error:
            if type(error) in (RunError, WorkerLost) and is_disk_full(self.directory.path):
                raise self._disk_full(error) from error
            error.evidence = attempt.evidence_of(error)
            require_new_failure(error, self.directory.failure, ledger.next_step)
            raise
        except NewAttempt:
            if not stop:
                raise
        except BaseException as error:
            if not (stop and isinstance(error, KeyboardInterrupt)):  # StopNow
                if is_disk_full(self.directory.path):
                    raise self._disk_full(error) from error
                log.exception("the attempt failed unexpectedly")
                return Outcome(ExitCode.ERROR, crash_report(error, self.directory.controller_log), ledger.last_step)
        if stop.exit_code is not None and not self._is_finished(ledger):
            return Outcome(stop.exit_code, self._resume_hint(ledger, stop.exit_code), ledger.last_step)
        message = ExitCode.COMPLETE.meaning
        if ledger.last_step > (steps := self.job.spec.algorithm.steps):
            message += (
                f"; no step was trained, because algorithm.steps ({steps}) is below the {ledger.last_step} committed"
            )
        return Outcome(ExitCode.COMPLETE, message, ledger.last_step)

    def _recovery_state(self, ledger: Ledger) -> RecoveryState:
        """The state at the start of an attempt. A grown policy shrinks if the job does not allow its size any more."""
        supervision = self.supervision
        by_operator = supervision.by_operator
        steps, plan, changes = self.job.spec.algorithm.steps, supervision.plan, supervision.changes
        state = state_at_start(ledger, steps, plan, changes, supervised=by_operator)
        if by_operator or state.plan is None:
            return state
        return replace(state, plan=within_max_gpus(state.plan, self.job.spec))

    def _failed(self, ledger: Ledger, error: RunError, answer: Response) -> Outcome:
        message = str(error)
        if isinstance(answer, GiveUp) and answer.reason is not GiveUpReason.LEFT_TO_SUPERVISOR:
            message = answer.explanation
        message = message.rstrip(". ")
        end = "" if message.endswith("?") else "."
        hint = f"Logs: {self.directory.logs}." if error.given_up else self._resume_hint(ledger, error.exit_code)
        return Outcome(error.exit_code, f"{message}{end} {hint}", ledger.last_step, error, error.evidence)

    def _disk_full(self, cause: BaseException) -> OutputUnavailable:
        """The explanation of a failure whose own message does not name the full disk."""
        log.error("the disk is full", cause=f"{type(cause).__name__}: {cause}")
        full = OutputUnavailable(disk_full_message(self.directory.path))
        full.actor = getattr(cause, "actor", None)
        return full

    def _is_finished(self, ledger: Ledger) -> bool:
        return ledger.last_step >= self.job.spec.algorithm.steps and self.directory.model.exists()

    def _summary(self, ledger: Ledger, outcome: Outcome) -> Summary:
        return summarize(
            ledger.records,
            job=self.job.metadata.name,
            total_steps=self.job.spec.algorithm.steps,
            exit_code=outcome.exit_code,
            exit_reason=outcome.message,
        )

    def _resume_hint(self, ledger: Ledger, code: ExitCode) -> str:
        logs = f"Logs: {self.directory.logs}."
        if not code.retry:
            return logs
        is_last = ledger.last_step >= self.job.spec.algorithm.steps
        hint = self.export_hint if is_last else self.resume_hint.format(step=ledger.next_step)
        return f"{hint} {logs}"


def require_new_failure(failure: RunError, record: Path, step: int) -> None:
    """Record the exception of a role, and raise `BadInput` if the attempt before has recorded the same one.

    Two are the same if they have the same type, in the same call of the same role at the same uncommitted `step`. Other
    failures, which may pass, are not compared. `record`: a file that survives the attempt, in pods as well.
    """
    if failure.raised is None or isinstance(failure, BadInput):
        return
    role = (failure.actor or "").partition("-")[0]
    place = {"raised": failure.raised, "role": role, "step": step}
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        before = dict(json.loads(record.read_bytes()))
    if {name: before.get(name) for name in place} != place:
        write_atomically(record, json.dumps(place | {"message": str(failure)}).encode())
        return
    repeated = BadInput(
        f"{before.get('message', failure)}; a restart failed in the same way at step {step}: change the model, the "
        "data or the settings"
    )
    repeated.actor = failure.actor
    raise repeated from failure
