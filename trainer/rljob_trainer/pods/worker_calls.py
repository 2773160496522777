"""Functions that the controller runs in each worker's pod, through Ray."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from rljob_trainer.errors import WorkerLost
from rljob_trainer.pods.environment import WorkerEnvironment
from rljob_trainer.pods.ray_node import worker_resource
from rljob_trainer.roles.placement import Bundle
from rljob_trainer.telemetry.host_memory import host_memory

Result = TypeVar("Result")

_A_LITTLE = 0.001
"""Of the resource that only one worker has: enough to be placed there, and there is enough for many."""


def only_on(worker: int) -> Bundle:
    """What to ask Ray for, to be placed in the worker of that number."""
    return {worker_resource(worker): _A_LITTLE}


def call_workers(function: Callable[[], Result], workers: int, timeout_seconds: float) -> list[Result]:
    """`function`'s result in each worker's pod, in order. Raises `WorkerLost` where one does not answer in time."""
    import ray
    from ray import exceptions

    remote = ray.remote(function)
    calls = [remote.options(num_cpus=0, resources=only_on(worker), max_retries=0).remote() for worker in range(workers)]
    try:
        results: list[Result] = ray.get(calls, timeout=timeout_seconds)
    except (
        exceptions.GetTimeoutError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.OutOfMemoryError,
    ) as error:
        raise WorkerLost(f"a worker did not answer {function.__name__} within {timeout_seconds:g} s") from error
    return results


def note_that_the_controller_ended() -> None:
    """Tell the pod that this runs in: when the head goes now, that is in order."""
    WorkerEnvironment.read(os.environ).controller_ended_file.touch()


def note_that_the_pods_restart() -> None:
    """Tell the pod that this runs in: when the head goes now, its containers are to start anew."""
    WorkerEnvironment.read(os.environ).restart_file.touch()


def own_kills_by_the_kernel() -> int:
    """How many processes of this pod's container the kernel has killed for their memory."""
    return host_memory().oom_kills
