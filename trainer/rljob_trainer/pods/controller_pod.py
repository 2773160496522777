"""`rljob controller`: runs in the controller's pod, from its environment to its termination message.

A failed controller waits for the next attempt, for which its pods are restarted in place. The operator writes the
memory plan to the job's status, then the settings of the next attempt to the pods' ConfigMap, then the record of that
attempt, and finally its decision in the StepReport. The decision names the attempt and the generation of its plan, and
restarted containers wait for settings with these (`attempt_start`). Pods that are to be replaced are deleted instead,
and the signal ends the wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_api.plan_change import Phase
from rljob_api.step_report import PendingExit, StepReportStatus
from rljob_api.termination_message import TerminationMessage
from rljob_api.topology import worker_pods
from rljob_memory.host_watch import HostWatch
from rljob_memory.sample import MemorySample
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.pods.attempt_start import RequiredAttempt, job_of_attempt, start_attempt
from rljob_trainer.pods.environment import ControllerEnvironment, InvalidEnvironment
from rljob_trainer.pods.job_metrics import JobMetrics, serve
from rljob_trainer.pods.pod_placement import PodPlacement
from rljob_trainer.pods.termination import exit_code_of, write_termination_message
from rljob_trainer.pods.worker_facts import workers_of_processes
from rljob_trainer.run_listener import Listeners
from rljob_trainer.runtime.attempt_plan import Supervision
from rljob_trainer.runtime.job_run import JobRun, Outcome, changeable_settings, identity
from rljob_trainer.step_report.api_server import NoAnswer, StepReportClient
from rljob_trainer.step_report.reporter import ReportStore, StepReporter, role_and_rank

_LOCK_SECONDS = 120.0
"""Time to wait for the volume: on NFS, the lock of a controller whose node is gone lasts about a minute."""
_LAST_REPORT_SECONDS = 30.0


def run_controller(variables: Mapping[str, str]) -> ExitCode:
    """Train the job of the pod's environment. The termination message explains the exit code."""
    return exit_code_of(partial(_run, variables), variables)


def _run(variables: Mapping[str, str]) -> ExitCode:
    environment = ControllerEnvironment.read(variables)
    settings = start_attempt(environment)
    job = job_of_attempt(environment, settings)
    _require_as_many_workers(environment, job)
    print(f"{environment.namespace}/{environment.name}, attempt {settings.attempt}", flush=True)
    directory = OutputDirectory(environment.output)
    with directory.open(
        environment.manifest.read_text(encoding="utf-8"),
        identity(job),
        changeable=changeable_settings(job),
        pod=f"{environment.namespace}/{os.uname().nodename}",
        wait_seconds=_LOCK_SECONDS,
    ):
        return _attempt(environment, settings, job, directory)


def _attempt(
    environment: ControllerEnvironment, settings: AttemptSettings, job: RLJob, directory: OutputDirectory
) -> ExitCode:
    reports = _report_client(environment)
    listener = AttemptListener(reports, settings.attempt, environment.ready_file)
    metrics = JobMetrics(job.metadata.name, job.spec.algorithm.steps)
    _serve_metrics(metrics, environment)
    placement = PodPlacement(environment, directory.logs / "ray-start.log", listener.host_memory)
    outcome = JobRun(
        job,
        environment.task_dir or environment.manifest.parent,
        directory,
        placement,
        Listeners(listener, metrics),
        mounted_model=environment.model_dir,
        supervision=Supervision(
            attempt=settings.attempt,
            plan=settings.memory_plan,
            profile=settings.memory_profile,
            changes=settings.plan_changes,
            # The operator applies changes that need new containers or pods.
            levels=frozenset({"Live", "RespawnRole"}),
            allocator_environments=settings.allocator_environments,
        ),
        resume_hint="The next attempt resumes at step {step}.",
        export_hint="The next attempt writes the model.",
    ).run()
    if outcome.evidence is not None:
        listener.failed(outcome.evidence)
    message = _with_pod(outcome, environment, job)
    write_termination_message(
        environment.termination_log,
        TerminationMessage(exit_code=outcome.exit_code, message=message, step=outcome.steps, evidence=outcome.evidence),
    )
    restart_for = None
    # A worker that does not respond is exiting and may report the cause. A restart in place would not wait for that.
    may_restart = environment.restarts_in_place and placement.workers_answer
    if reports is not None and may_restart and outcome.exit_code in MAY_RESTART_IN_PLACE:
        listener.exit_pending(PendingExit(exit_code=outcome.exit_code, message=message[:_LONGEST_MESSAGE]))
        print(f"waiting for the next attempt, for at most {WAIT_SECONDS:.0f} s", flush=True)
        restart_for = wait_for_restart(reports.read, settings.attempt)
    if restart_for is not None:
        placement.restart_pods(restart_for)
    listener.close(_LAST_REPORT_SECONDS)
    return ExitCode.RESTART_IN_PLACE if restart_for is not None else outcome.exit_code


def _serve_metrics(metrics: JobMetrics, environment: ControllerEnvironment) -> None:
    """Serve the metrics to those with the token, if there is one. Without a free port, the job runs without them."""
    if environment.metrics_token_sha256 is None:
        return
    try:
        serve(metrics.registry, environment.metrics_port, environment.metrics_token_sha256)
    except OSError as error:
        print(f"warning: no metrics on port {environment.metrics_port}: {error}", flush=True)


def _require_as_many_workers(environment: ControllerEnvironment, job: RLJob) -> None:
    wanted = {f"{pods.role}.replicas": pods.replicas for pods in worker_pods(job.spec)}
    if environment.workers != sum(wanted.values()):
        raise InvalidEnvironment(
            f"expected RLJOB_WORKERS to equal {' + '.join(wanted)} ({sum(wanted.values())}), "
            f"found {environment.workers}: the pods and {environment.manifest} belong to different jobs"
        )


def _report_client(environment: ControllerEnvironment) -> StepReportClient | None:
    """None outside a cluster."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if host is None or environment.step_report is None:
        return None
    return StepReportClient(host, port, environment.service_account, environment.namespace, environment.step_report)


def _with_pod(outcome: Outcome, environment: ControllerEnvironment, job: RLJob) -> str:
    """The outcome's message, with the name of the pod in which a process failed."""
    if outcome.error is None or outcome.error.actor is None:
        return outcome.message + advice_about_files(outcome, environment)
    number = workers_of_processes(job.spec)[outcome.error.actor]
    return f"In pod {environment.worker_pod_names(job.spec)[number]}: {outcome.message}"


def advice_about_files(outcome: Outcome, environment: ControllerEnvironment) -> str:
    """Advice for a job whose files are expected next to the manifest, where a pod has none; otherwise empty."""
    next_to_manifest = f"{environment.manifest.parent}" in outcome.message
    if outcome.exit_code != ExitCode.BAD_INPUT or environment.task_dir is not None or not next_to_manifest:
        return ""
    return (
        " Files next to the manifest are not in pods: put them into a ConfigMap or a claim, and name it in task.files."
    )


class AttemptListener(StepReporter):
    """Reports progress, and signals readiness to the pod's probes."""

    def __init__(self, store: ReportStore | None, attempt: int, ready_file: Path) -> None:
        """`ready_file`: created when the roles are up and work on a step."""
        super().__init__(store, attempt)
        self._ready_file = ready_file
        self._watches: dict[str | None, HostWatch] = {}

    def phase_began(self, step: int, phase: Phase) -> None:
        self._ready_file.touch()
        super().phase_began(step, phase)

    def host_memory(self, samples: Mapping[str | None, MemorySample]) -> None:
        """Called about every second. `samples`: of each container, by its first process; None is the controller's."""
        now, found = time.monotonic(), []
        for process, sample in samples.items():
            watch = self._watches.setdefault(process, HostWatch(*role_and_rank(process)))
            found += [pressure] if (pressure := watch.look(now, sample)) else []
        self.shortage(min(found, key=lambda pressure: pressure.diagnosis.numbers["room_bytes"], default=None))


WAIT_SECONDS = 60.0
MAY_RESTART_IN_PLACE = frozenset(
    {
        ExitCode.DEVICE_OUT_OF_MEMORY,
        ExitCode.HOST_OUT_OF_MEMORY,
        ExitCode.SHARED_MEMORY_EXHAUSTED,
        ExitCode.WORKER_LOST,
    }
)
"""Failures after which new processes in the same pods can resume."""

_POLL_SECONDS = 1.0
_LONGEST_MESSAGE = 1024


def wait_for_restart(read_report: Callable[[], StepReportStatus | None], attempt: int) -> RequiredAttempt | None:
    """Wait for the operator's decision about the failed pods of `attempt`, for at most a minute.

    Returns the attempt for which the pods are to be restarted in place; None if they are not.

    `read_report`: returns the stored report; may raise `NoAnswer`.
    """
    give_up_at = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < give_up_at:
        report = None
        with suppress(NoAnswer):
            report = read_report()
        decision = report.decision if report else None
        if decision is not None and decision.attempt == attempt:  # not about an earlier attempt
            if decision.next_attempt is None:
                return None
            return RequiredAttempt(number=decision.next_attempt, plan_generation=decision.plan_generation or 1)
        time.sleep(_POLL_SECONDS)
    return None
