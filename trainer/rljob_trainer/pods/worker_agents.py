"""Agents: a small process in each worker's pod, in which the controller runs functions through Ray.

They start with the attempt. A process that started only after memory ran out, or during a shutdown, would often be too
late: it takes a second of CPU time, and much longer on a busy node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from rljob_trainer.errors import WorkerLost
from rljob_trainer.pods.attempt_start import RequiredAttempt, announce_restart
from rljob_trainer.pods.environment import WorkerEnvironment
from rljob_trainer.pods.ray_node import only_on
from rljob_trainer.telemetry.host_memory import host_memory

Result = TypeVar("Result")

_NAMESPACE = "rljob"


class WorkerAgents:
    """One agent in each worker's pod. They outlive the connection to Ray that started them, and exit with the head."""

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
        import ray
        from ray import exceptions

        agents = {worker: _find(worker) for worker in range(self._workers)}
        calls = [agent.call.remote(function, *arguments) for agent in agents.values() if agent is not None]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=timeout_seconds)
        if gone := [str(worker) for worker, agent in agents.items() if agent is None]:
            raise WorkerLost(f"worker {', '.join(gone)} exited before {function.__name__}")
        try:
            results: list[Result] = ray.get(calls, timeout=0)
        except (exceptions.GetTimeoutError, exceptions.RayActorError, exceptions.OutOfMemoryError) as error:
            raise WorkerLost(f"a worker did not answer {function.__name__} within {timeout_seconds:g} s") from error
        return results

    def answers(self, function: Callable[[], Result], timeout_seconds: float) -> dict[int, Result]:
        """The result of `function` by worker, for those that answer in time."""
        import ray
        from ray import exceptions

        agents = {worker: _find(worker) for worker in range(self._workers)}
        worker_of = {agent.call.remote(function): worker for worker, agent in agents.items() if agent is not None}
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
