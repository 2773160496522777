"""`rljob worker`: what runs in a worker's pod. It joins the controller's Ray, and stays until that is gone."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from types import FrameType

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_api.manifest import load_manifest
from rljob_api.termination_message import TerminationMessage
from rljob_trainer.errors import TrainerError, WorkerLost
from rljob_trainer.hardware import this_machine
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.pods import ray_node
from rljob_trainer.pods.environment import WorkerEnvironment
from rljob_trainer.pods.head_watch import Ending, HeadWatch, Seen
from rljob_trainer.pods.restart_in_place import begin_life
from rljob_trainer.pods.termination import ended_early, tell_ending
from rljob_trainer.pods.worker_facts import ray_cpus
from rljob_trainer.runtime.stop_request import StopNow
from rljob_trainer.telemetry.host_memory import host_memory

Address = tuple[str, int]

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 10.0
_SAY_EVERY_SECONDS = 30.0
_LOOK_EVERY_SECONDS = 1.0
_PROBE_SECONDS = 3.0


def run_worker(variables: Mapping[str, str]) -> ExitCode:
    """Lend this pod to the job's roles; 0 where the controller ended in order."""
    with ended_early(variables) as early:
        environment = WorkerEnvironment.read(variables)
        begin_life(environment)
        ending = _life(environment)
        _say(ending.sentence)
        message = TerminationMessage(exit_code=ending.exit_code, message=ending.sentence)
        tell_ending(environment.termination_log, message)
        return ending.exit_code
    return early.exit_code


def _life(environment: WorkerEnvironment) -> Ending:
    job = load_manifest(environment.manifest)
    _say(f"{environment.namespace}/{environment.name}, attempt {environment.attempt}: worker {environment.index}")
    termination = _TerminationRequest()
    try:
        _say(f"model: {resolve_model(job.spec.model.uri, mounted=environment.model_dir)}")
        head = _join(environment, job)
        environment.ready_file.touch()
        _say(f"joined {environment.ray_head}")
        termination.work_in_progress = True
        return _stay(environment, head)
    except StopNow:
        return Ending(ExitCode.TERMINATED, "stopped by SIGTERM")


# --- joining ---


def _join(environment: WorkerEnvironment, job: RLJob) -> Address:
    """The head's address, once this pod is a node of its Ray. Raises `WorkerLost` where that takes too long."""
    began = time.monotonic()
    wait, next_say = _FIRST_WAIT_SECONDS, began
    while True:
        try:
            head = _reach(environment.ray_head_address)
            _start_ray(environment, job, head)
            return head
        except (OSError, TrainerError) as error:
            waited = time.monotonic() - began
            if waited > environment.join_timeout_seconds:
                raise WorkerLost(
                    f"the controller's Ray at {environment.ray_head} could not be joined within "
                    f"{environment.join_timeout_seconds:g} s: {error}. Look at the controller's pod"
                ) from error
            if time.monotonic() >= next_say:
                _say(f"waiting for the controller's Ray at {environment.ray_head}, since {waited:.0f} s: {error}")
                next_say = time.monotonic() + _SAY_EVERY_SECONDS
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _reach(address: Address) -> Address:
    """The IP address and port behind a name. From then on DNS may fail without harm. Raises OSError."""
    with socket.create_connection(address, timeout=_PROBE_SECONDS) as connection:
        ip, port = connection.getpeername()[:2]
        return str(ip), int(port)


def _start_ray(environment: WorkerEnvironment, job: RLJob, head: Address) -> None:
    log = environment.run_dir / "ray-start.log"
    command = ray_node.worker_command(
        head=ray_node.endpoint(*head),
        pod_ip=environment.pod_ip,
        ports=ray_node.RayPorts(environment.ray_first_port),
        cpus=ray_cpus(job.spec.policy),
        gpus=len(this_machine().gpu_memory_bytes),
        resource=ray_node.worker_resource(environment.index),
    )
    ray_node.require_started(ray_node.begin(command, log).wait(), log)


# --- staying ---


def _stay(environment: WorkerEnvironment, head: Address) -> Ending:
    raylet = (environment.pod_ip, ray_node.RayPorts(environment.ray_first_port).node_manager)
    watch = HeadWatch(environment.ray_head, time.monotonic())
    kills_before = host_memory().oom_kills
    while True:
        seen = Seen(
            head=_answers(head),
            raylet=_answers(raylet),
            controller_ended=environment.controller_ended_file.exists(),
            to_restart=environment.restart_file.exists(),
            kills=host_memory().oom_kills - kills_before,
        )
        if (ending := watch.look(seen, time.monotonic())) is not None:
            return ending
        time.sleep(_LOOK_EVERY_SECONDS)


def _answers(address: Address) -> bool:
    try:
        _reach(address)
    except OSError:
        return False
    return True


class _TerminationRequest:
    """SIGTERM ends the worker at once while it waits; while it works, only the second one does.

    A pod on a node that is being emptied gets the first: the operator then stops the controller, which commits its
    step, and for that it needs this worker.
    """

    def __init__(self) -> None:
        self.work_in_progress = False
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self.work_in_progress:
            raise StopNow
        self.work_in_progress = False
        _say("SIGTERM: working on until the controller has ended (once more: ending at once)")


def _say(text: str) -> None:
    print(text, flush=True)
