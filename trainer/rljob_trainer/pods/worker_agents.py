"""A small process in each worker's pod, in which the controller runs functions of its own, through Ray.

It is there from the start: when memory has run out or the end has come, a process that began only then would often be
too late, since it takes a second of processor time, and many on a busy node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from rljob_trainer.errors import WorkerLost
from rljob_trainer.pods.environment import WorkerEnvironment
from rljob_trainer.pods.ray_node import only_on
from rljob_trainer.telemetry.host_memory import host_memory

Result = TypeVar("Result")

_NAMESPACE = "rljob"


class WorkerAgents:
    """One agent in each worker's pod. They outlive the connection to Ray that started them, and end with the head."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def start(self) -> None:
        """Have each one start when its worker has joined; a call waits until they are up."""
        import ray

        for worker in range(self._workers):
            options = {"name": _name(worker), "namespace": _NAMESPACE, "lifetime": "detached"}
            ray.remote(_Agent).options(num_cpus=0, resources=only_on(worker), **options).remote()

    def call(self, function: Callable[[], Result], timeout_seconds: float) -> list[Result]:
        """`function`'s result in each worker's pod, in order.

        Raises `WorkerLost` where one does not answer in time; the others have then been asked all the same.
        """
        import ray
        from ray import exceptions

        agents = {worker: _find(worker) for worker in range(self._workers)}
        calls = [agent.call.remote(function) for agent in agents.values() if agent is not None]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=timeout_seconds)
        if gone := [str(worker) for worker, agent in agents.items() if agent is None]:
            raise WorkerLost(f"worker {', '.join(gone)} left before it was asked for {function.__name__}")
        try:
            results: list[Result] = ray.get(calls, timeout=0)
        except (exceptions.GetTimeoutError, exceptions.RayActorError, exceptions.OutOfMemoryError) as error:
            raise WorkerLost(f"a worker did not answer {function.__name__} within {timeout_seconds:g} s") from error
        return results

    def answers(self, function: Callable[[], Result], timeout_seconds: float) -> dict[int, Result]:
        """`function`'s result by worker, of those that answer in time."""
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
    def call(self, function: Callable[[], Any]) -> Any:
        return function()


def _name(worker: int) -> str:
    return f"agent-{worker}"


def _find(worker: int) -> Any | None:
    """None where the agent has ended, with its pod or alone."""
    import ray

    try:
        return ray.get_actor(_name(worker), _NAMESPACE)
    except ValueError:
        return None


# --- what they are asked ---


def note_that_the_controller_ended() -> None:
    """Tell the pod that this runs in: when the head goes now, that is in order."""
    WorkerEnvironment.read(os.environ).controller_ended_file.touch()


def note_that_the_pods_restart() -> None:
    """Tell the pod that this runs in: when the head goes now, its containers are to start anew."""
    WorkerEnvironment.read(os.environ).restart_file.touch()


def own_kills_by_the_kernel() -> int:
    """How many processes of this pod's container the kernel has killed for their memory."""
    return host_memory().oom_kills
