"""`rljob worker`: runs in a worker's pod. It joins the controller's Ray, and stays until Ray is gone."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_api.status import Role
from rljob_api.termination_message import TerminationMessage
from rljob_api.topology import worker_pods
from rljob_client.errors import RunError
from rljob_memory.budget.host import beside_the_object_store_bytes
from rljob_memory.workload import workload_of
from rljob_trainer.errors import WorkerLost
from rljob_trainer.hardware import this_machine
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.pods import ray_node
from rljob_trainer.pods.attempt_start import job_of_attempt, start_attempt
from rljob_trainer.pods.compile_cache import CompileCache, code_platform, is_kept_elsewhere, platform_key
from rljob_trainer.pods.environment import WorkerEnvironment
from rljob_trainer.pods.termination import exit_code_of, write_termination_message
from rljob_trainer.pods.worker_facts import ray_cpus, require_engine_here, worker_facts
from rljob_trainer.roles.warm.start import start_warm
from rljob_trainer.runtime.requirements import require_usable
from rljob_trainer.runtime.stop_request import StopNow
from rljob_trainer.telemetry.host_memory import host_memory

Address = tuple[str, int]
Exit = tuple[ExitCode, str]
"""Exit code of the worker, and its explanation."""

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 10.0
_LOG_EVERY_SECONDS = 30.0
_POLL_SECONDS = 1.0
_KEEP_EVERY_SECONDS = 60.0
_PROBE_SECONDS = 3.0


def run_worker(variables: Mapping[str, str]) -> ExitCode:
    """Offer this pod to the job's roles. Returns COMPLETE after a planned exit of the controller."""
    return exit_code_of(partial(_run, variables), variables)


def _run(variables: Mapping[str, str]) -> ExitCode:
    environment = WorkerEnvironment.read(variables)
    settings = start_attempt(environment)
    worker = f"{environment.role} worker {environment.index}"
    _log(f"{environment.namespace}/{environment.name}, attempt {settings.attempt}: {worker}")
    code, message = _work(environment, job_of_attempt(environment, settings))
    _log(message)
    write_termination_message(environment.termination_log, TerminationMessage(exit_code=code, message=message))
    return code


def _work(environment: WorkerEnvironment, job: RLJob) -> Exit:
    others_take_over = environment.role == "rollout" and worker_pods(job.spec)[-1].replicas > 1
    termination = _TerminationRequest(others_take_over=others_take_over)
    try:
        require_engine_here(job.spec, environment.role, worker_facts())
        cache = _restored_cache(environment)
        roles: list[Role] = ["policy", "rollout"] if job.spec.topology == "Colocated" else [environment.role]
        start_warm(roles, this_machine().choose_device("auto"))  # imports while the pod joins
        accept = partial(require_usable, job.spec)
        _log(f"model: {resolve_model(job.spec.model.uri, mounted=environment.model_dir, accept=accept)}")
        head = _join(environment, job)
        environment.ready_file.touch()
        _log(f"joined {environment.ray_head}")
        termination.work_in_progress = True
        if cache is not None and environment.index == 0:
            threading.Thread(target=_keep, args=(cache,), name="compile cache", daemon=True).start()
        return _stay(environment, head)
    except KeyboardInterrupt:  # StopNow
        if termination.work_in_progress:
            ray_node.leave()
        return ExitCode.TERMINATED, "stopped by SIGTERM"


# --- compiled code ---


def _restored_cache(environment: WorkerEnvironment) -> CompileCache | None:
    """The cache for compiled code, whose variables are set for the processes that this one starts; None without."""
    if environment.compile_cache_dir is None or is_kept_elsewhere(os.environ):
        return None
    name = f"{platform_key(code_platform())}-{environment.role}"
    cache = CompileCache(Path(tempfile.gettempdir(), "rljob-compiled"), environment.compile_cache_dir, name)
    _log(cache.restore())
    os.environ.update(cache.variables())
    return cache


def _keep(cache: CompileCache) -> None:
    """Save new code while the job runs: a pod may end at any time. All pods of a role compile the same."""
    while True:
        time.sleep(_KEEP_EVERY_SECONDS)
        if (message := cache.save_if_settled()) is not None:
            _log(message)


# --- joining ---


def _join(environment: WorkerEnvironment, job: RLJob) -> Address:
    """Join the head, and return its address. Raises `WorkerLost` if that takes too long."""
    began = time.monotonic()
    wait, next_log = _FIRST_WAIT_SECONDS, began
    while True:
        try:
            head = _reach(environment.ray_head_address)
            _start_ray(environment, job, head)
            return head
        except (OSError, RunError) as error:
            waited = time.monotonic() - began
            if waited > environment.join_timeout_seconds:
                raise WorkerLost(
                    f"expected to join the controller's Ray at {environment.ray_head} within "
                    f"{environment.join_timeout_seconds:g} s, found: {error}; check the controller's pod"
                ) from error
            if time.monotonic() >= next_log:
                _log(f"still waiting for the controller's Ray at {environment.ray_head} after {waited:.0f} s: {error}")
                next_log = time.monotonic() + _LOG_EVERY_SECONDS
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _reach(address: Address) -> Address:
    """Resolve and connect. Returns IP address and port, so that DNS is not needed later. Raises OSError."""
    with socket.create_connection(address, timeout=_PROBE_SECONDS) as connection:
        ip, port = connection.getpeername()[:2]
        return str(ip), int(port)


def _start_ray(environment: WorkerEnvironment, job: RLJob, head: Address) -> None:
    log, machine = environment.run_dir / "ray-start.log", this_machine()
    command = ray_node.worker_command(
        head=ray_node.endpoint(*head),
        pod_ip=environment.pod_ip,
        first_port=environment.ray_first_port,
        cpus=ray_cpus(job.spec, environment.role),
        gpus=len(machine.gpu_memory_bytes),
        resource=ray_node.worker_resource(environment.worker_number(job.spec)),
        shared_by_others_bytes=beside_the_object_store_bytes(
            workload_of(job.spec),
            machine.choose_device("auto"),
            "rollout" if environment.role == "rollout" else "policy",
        ),
    )
    ray_node.require_started(ray_node.begin(command, log).wait(), log)


# --- staying ---


def _stay(environment: WorkerEnvironment, head: Address) -> Exit:
    raylet = (environment.pod_ip, environment.ray_first_port)  # the node manager's port
    answered_at, kills_before = time.monotonic(), host_memory().oom_kills
    while True:
        head_answers, now = _answers(head), time.monotonic()
        answered_at = now if head_answers else answered_at
        observed = Observed(
            head=head_answers,
            silent_seconds=now - answered_at,
            raylet=_answers(raylet),
            controller_ended=environment.controller_ended_file.exists(),
            to_restart=environment.restart_file.exists(),
            oom_kills=host_memory().oom_kills - kills_before,
        )
        if (result := exit_of_worker(observed, environment.ray_head)) is not None:
            return result
        time.sleep(_POLL_SECONDS)


def _answers(address: Address) -> bool:
    try:
        _reach(address)
    except OSError:
        return False
    return True


class _TerminationRequest:
    """SIGTERM stops a waiting worker at once. A working one is stopped by the second signal only.

    A pod on a node that is drained gets the first signal. The operator then stops the controller, which needs this
    worker to commit its step. If the engines of other pods can take over its work, the first signal is enough.
    """

    def __init__(self, *, others_take_over: bool = False) -> None:
        self.work_in_progress = False
        self._others_take_over = others_take_over
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self.work_in_progress or self._others_take_over:
            raise StopNow
        self.work_in_progress = False
        _log("SIGTERM: continuing until the controller has exited (a second signal stops at once)")


def _log(text: str) -> None:
    print(text, flush=True)


HEAD_GONE_SECONDS = 15.0
"""A head that does not answer for this long counts as gone. Shorter interruptions of the network are tolerated."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One observation of a worker that has joined its Ray head."""

    head: bool = True
    """The head accepts connections."""

    silent_seconds: float = 0.0
    """Time since it last did."""

    raylet: bool = True
    """Ray in this pod accepts connections."""

    controller_ended: bool = False
    """The controller has announced its exit."""

    to_restart: bool = False
    """The controller has announced a restart of the pods in place."""

    oom_kills: int = 0
    """Processes of this container that the kernel has OOM-killed."""


def exit_of_worker(observed: Observed, head: str) -> Exit | None:
    """The exit code and message of the worker, if it is to exit now; otherwise None. Pure.

    `head`: address of the Ray head, for the message.
    """
    if observed.head:
        # A raylet exits by itself after its head. If the head still answers, the exit is a failure.
        if observed.raylet or observed.controller_ended:
            return None
        if not observed.oom_kills:
            return ExitCode.WORKER_LOST, "Ray ended in this pod"
        # The kernel may have killed Ray itself, which nothing else can report.
        return ExitCode.HOST_OUT_OF_MEMORY, (
            f"Ray ended in this pod: the kernel killed {observed.oom_kills} of this container's processes, since it "
            "reached its memory limit (OOMKilled)"
        )
    if observed.to_restart:  # only after the head is gone: it must not be joined again
        return ExitCode.RESTART_IN_PLACE, "the pods are restarted in place under a changed memory plan"
    if observed.controller_ended:
        return ExitCode.COMPLETE, "the controller has exited; this worker exits too"
    if observed.silent_seconds < HEAD_GONE_SECONDS:
        return None
    return ExitCode.WORKER_LOST, (
        f"the controller is gone: {head} has not answered for {observed.silent_seconds:.0f} s; "
        "check the termination message of its pod"
    )
