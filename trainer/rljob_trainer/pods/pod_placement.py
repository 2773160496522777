"""Placement of the roles in the worker pods. Ray in this pod is the head, and runs no role."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rljob_api.job import RLJobSpec
from rljob_memory.host_watch import LOOK_EVERY_SECONDS
from rljob_memory.sample import MemorySample
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import SharedMemoryExhausted, WorkerLost
from rljob_trainer.pods import ray_node
from rljob_trainer.pods.attempt_start import RequiredAttempt, announce_restart
from rljob_trainer.pods.environment import ControllerEnvironment, WorkerEnvironment
from rljob_trainer.pods.ray_node import only_on
from rljob_trainer.pods.worker_facts import role_hosts, worker_facts, workers_of_processes
from rljob_trainer.roles.ray_driver import connect
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.stop_request import StopNow, StopRequest
from rljob_trainer.telemetry.host_memory import host_memory

_POLL_SECONDS = 0.5
_FIRST_NOTE_SECONDS, _NOTE_EVERY_SECONDS = 30.0, 60.0
_FACTS_SECONDS = 120.0
_END_NOTE_SECONDS = 5.0
_KILLS_SECONDS = 60.0
"""A container at its memory limit reads its programs from the disk again and again until enough of it was killed. An
agent that is gone is not waited for."""
_LOOK_SECONDS, _LAST_LOOK_SECONDS = 3.0, 10.0
_MIB = 1 << 20

OnHostMemory = Callable[[Mapping[str | None, MemorySample]], None]
"""Called about every second, from a thread of its own, with the host memory of each container by the name of its first
process; None is the controller's."""


class PodPlacement:
    """One process per GPU of each worker pod, or per pod if it requests no GPU; two if the roles are colocated."""

    def __init__(self, environment: ControllerEnvironment, log: Path, on_host_memory: OnHostMemory) -> None:
        """`log`: receives the output of `ray start`."""
        self._environment = environment
        self._log = log
        self._on_host_memory = on_host_memory
        self._watch: threading.Thread | None = None
        self._watch_ended = threading.Event()
        self._agents = WorkerAgents(environment.workers)
        self._connected = False
        self._first_processes: dict[int, str] = {}
        """Name of the first process of each worker."""
        self._kills = 0
        self._kills_of_workers: dict[int, int] = {}
        self.workers_answer = True
        """True if all workers answered when they were last asked. One that does not cannot restart in place."""

    def __enter__(self) -> Self:
        """Start the Ray head without waiting: it takes seconds, in which the model and the task can be read."""
        _, port = self._environment.ray_head_address
        command = ray_node.head_command(
            pod_ip=self._environment.pod_ip, port=port, first_port=self._environment.ray_first_port
        )
        self._starting = ray_node.begin(command, self._log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch_ended.set()
        if self._watch is not None:
            self._watch.join(_LAST_LOOK_SECONDS)  # it must not use Ray after the shutdown
        if not self._connected:
            self._starting.kill()
            self._starting.wait()
            return
        import ray

        # Best effort: a worker that is not reached reports the exit of the head as a failure.
        with suppress(Exception):
            self._agents.call(mark_controller_exited, _END_NOTE_SECONDS)
        ray.shutdown()

    def known_hosts(self, _spec: RLJobSpec) -> None:
        """Only the workers know their resources. Each one refuses a job that its own GPUs cannot run."""

    def survey(self, spec: RLJobSpec, display: RunDisplay, stop: StopRequest) -> RoleHosts:
        """Wait for Ray and for the workers to join it, and collect their resources."""
        display.phase("starting Ray")
        self._connect()
        names = self._environment.worker_pod_names(spec)
        places = workers_of_processes(spec)
        self._first_processes = {places[name]: name for name in reversed(places)}
        display.phase(f"waiting for {len(names)} worker{'s' if len(names) > 1 else ''} to join")
        _wait_for_workers(names, self._environment.join_timeout_seconds, display.note, stop)
        hosts = role_hosts(spec, self._agents.call(worker_facts, _FACTS_SECONDS), names)
        self._watch_ended.clear()
        self._watch = threading.Thread(target=self._watch_memory, name="memory", daemon=True)
        self._watch.start()
        if hosts.device == "cpu" and spec.policy.gpus_per_replica > 0:
            display.warning("the trainer image supports only CPUs: training on the CPU, although the job requests GPUs")
        return hosts

    def start_ray(self, _display: RunDisplay, object_store_bytes: int) -> None:
        """Check the size of the object stores.

        Raises `SharedMemoryExhausted` if a pod's /dev/shm is too small, attributed to the first process in that pod.
        """
        for node in _alive_nodes():
            room = int(node["Resources"].get("object_store_memory", 0))
            if room < object_store_bytes:
                too_small = SharedMemoryExhausted(
                    f"expected {object_store_bytes // _MIB} MiB for weights and rollouts in /dev/shm of every pod, "
                    f"found {room // _MIB} MiB; enlarge /dev/shm, which is never larger than the memory limit of its "
                    "pod, or lower memory.syncBucketSize"
                )
                too_small.actor = self._first_process_on(node)
                raise too_small

    def restart_pods(self, attempt: RequiredAttempt) -> None:
        """Announce a restart in place for `attempt` to all pods. It takes effect when the head is gone.

        Call it after the roles have ended. Best effort: pods that are not reached exit, and are replaced.
        """
        import ray

        announce_restart(self._environment, attempt)
        with suppress(Exception):
            self._reach_head()
            self._agents.call(mark_restart_in_place, _END_NOTE_SECONDS, attempt)
            ray.shutdown()

    def oom_kills(self) -> int:
        """OOM kills that have been seen in the containers of the workers. It never falls: when a worker answers again,
        those since its last answer are new. The container of a new pod begins with none.
        """
        kills = self._agents.answers(container_oom_kills, _KILLS_SECONDS)
        self.workers_answer = len(kills) == self._environment.workers
        self._kills += sum(max(now - self._kills_of_workers.get(worker, 0), 0) for worker, now in kills.items())
        self._kills_of_workers |= kills
        return self._kills

    def _watch_memory(self) -> None:
        """Look at the host memory of all containers until the attempt ends. A worker that does not answer is left
        out."""
        while not self._watch_ended.wait(LOOK_EVERY_SECONDS):
            samples: dict[str | None, MemorySample] = {None: host_memory()}
            with suppress(Exception):  # Ray is about to end
                for worker, sample in self._agents.answers(host_memory, _LOOK_SECONDS).items():
                    samples[self._first_processes[worker]] = sample
            self._on_host_memory(samples)

    def _first_process_on(self, node: dict[str, Any]) -> str | None:
        """None for the controller's own node."""
        resources, workers = node["Resources"], self._first_processes
        return next((name for worker, name in workers.items() if ray_node.worker_resource(worker) in resources), None)

    def _connect(self) -> None:
        ray_node.require_started(self._starting.wait(), self._log)
        self._reach_head()
        self._connected = True
        self._agents.start()

    def _reach_head(self) -> None:
        _, port = self._environment.ray_head_address
        connect(ray_node.endpoint(self._environment.pod_ip, port))


def _wait_for_workers(pods: list[str], timeout_seconds: float, note: Callable[[str], None], stop: StopRequest) -> None:
    began = time.monotonic()
    next_note = began + _FIRST_NOTE_SECONDS
    while missing := [pod for worker, pod in enumerate(pods) if not _has_joined(worker)]:
        if stop:
            raise StopNow
        waited = time.monotonic() - began
        if waited > timeout_seconds:
            raise WorkerLost(
                f"expected all workers to join within {timeout_seconds:g} s, {', '.join(missing)} did not; "
                "check them with `kubectl describe pod` and `kubectl logs`"
            )
        if time.monotonic() >= next_note:
            note(f"still waiting for {', '.join(missing)} after {waited:.0f} s")
            next_note += _NOTE_EVERY_SECONDS
        time.sleep(_POLL_SECONDS)


def _has_joined(worker: int) -> bool:
    resource = ray_node.worker_resource(worker)
    return any(resource in node["Resources"] for node in _alive_nodes())


def _alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


Result = TypeVar("Result")

_NAMESPACE = "rljob"


class WorkerAgents:
    """A small process in each worker's pod, in which the controller runs functions through Ray.

    Agents start with the attempt, outlive the connection to Ray that started them, and exit with the head. A process
    that started only after memory ran out, or during a shutdown, would often be too late: it takes a second of CPU
    time, and much longer on a busy node.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def start(self) -> None:
        """Start the agents without waiting: each starts once its worker has joined. A call waits until they are up."""
        import ray

        for worker in range(self._workers):
            # An agent that is lost with its pod starts again in the pod's successor.
            options = {"name": _name(worker), "namespace": _NAMESPACE, "lifetime": "detached", "max_restarts": -1}
            ray.remote(_Agent).options(num_cpus=0, resources=only_on(worker), **options).remote()

    def call(self, function: Callable[..., Result], timeout_seconds: float, *arguments: object) -> list[Result]:
        """The result of `function(*arguments)` in each worker's pod, in order.

        Raises `WorkerLost` if one does not answer in time; the function has then run in the others.
        """
        results = self.answers(function, timeout_seconds, *arguments)
        if silent := [str(worker) for worker in range(self._workers) if worker not in results]:
            raise WorkerLost(
                f"worker {', '.join(silent)} did not answer {function.__name__} within {timeout_seconds:g} s"
            )
        return [results[worker] for worker in range(self._workers)]

    def answers(self, function: Callable[..., Result], timeout_seconds: float, *arguments: object) -> dict[int, Result]:
        """The result of `function(*arguments)` by worker, for those that answer in time."""
        import ray
        from ray import exceptions

        agents = {worker: _find(worker) for worker in range(self._workers)}
        worker_of = {
            agent.call.remote(function, *arguments): worker for worker, agent in agents.items() if agent is not None
        }
        if not worker_of:
            return {}
        answered, _ = ray.wait(list(worker_of), num_returns=len(worker_of), timeout=timeout_seconds)
        results: dict[int, Result] = {}
        for call in answered:
            with suppress(exceptions.RayActorError, exceptions.OutOfMemoryError):
                results[worker_of[call]] = ray.get(call)
        return results


class _Agent:
    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        return function(*arguments)


def _name(worker: int) -> str:
    return f"agent-{worker}"


def _find(worker: int) -> Any | None:
    """The agent; None if it has exited."""
    import ray

    try:
        return ray.get_actor(_name(worker), _NAMESPACE)
    except ValueError:
        return None


# --- functions that run in the agents ---


def mark_controller_exited() -> None:
    """Announce to this pod that the head will exit as planned."""
    WorkerEnvironment.read(os.environ).controller_ended_file.touch()


def mark_restart_in_place(attempt: RequiredAttempt) -> None:
    """Announce to this pod that its containers are to be restarted for `attempt`, once the head has exited."""
    announce_restart(WorkerEnvironment.read(os.environ), attempt)


def container_oom_kills() -> int:
    """Number of processes of this pod's container that the kernel has OOM-killed."""
    return host_memory().oom_kills
