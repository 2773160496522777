"""Runs jobs on the GPUs of a machine, as many at a time as there are GPUs for, until the time is up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from rljob_testing.plan_accuracy.errors import Row

PATIENCE = 2.0
"""A job is stopped after this multiple of its estimated time."""


@dataclass(frozen=True, slots=True)
class GpuJob:
    """A program for some GPUs."""

    name: str
    model: str
    """The model that `run_jobs` has to prepare before."""
    gpus: int
    seconds: float
    """Estimated."""
    run: Callable[[Sequence[Any], float], Row]
    """Returns the row of the job, from its GPUs and the seconds that it may take."""


def in_order(jobs: Iterable[GpuJob]) -> list[GpuJob]:
    """Those that need most GPUs first, then those that take longest."""
    return sorted(jobs, key=lambda job: (-job.gpus, -job.seconds))


def next_job(waiting: Sequence[GpuJob], free_gpus: int, ready: frozenset[str], seconds_left: float) -> GpuJob | None:
    """The first job in order that has its GPUs, its model (`ready`) and time; None if there is none now."""
    for job in waiting:
        if job.gpus <= free_gpus and job.model in ready and job.seconds <= seconds_left:
            return job
    return None


def run_jobs(
    jobs: Iterable[GpuJob],
    gpus: Sequence[Any],
    seconds: float,
    prepare: Callable[[str], object],
    record: Callable[[GpuJob, Row], None],
) -> list[GpuJob]:
    """Run the jobs; returns those that did not start, because no time was left.

    `prepare`: called with each model, meanwhile. `record`: called with each row, one at a
    time; a job that raises an exception has a row with the `reason`.
    """
    deadline, lock = time.monotonic() + seconds, threading.Lock()

    def run(job: GpuJob, mine: Sequence[Any]) -> None:
        try:
            row = job.run(mine, min(PATIENCE * job.seconds, deadline - time.monotonic()))
        except Exception as error:  # the other jobs still run
            row = {"arm": job.name, "exit_code": None, "reason": repr(error)}
        with lock:
            record(job, row)

    waiting, free = in_order(jobs), list(gpus)
    running: dict[Future[None], list[Any]] = {}
    with ThreadPoolExecutor(len(gpus)) as workers, ThreadPoolExecutor() as writers:
        models = {writers.submit(prepare, model): model for model in {job.model for job in waiting}}
        while waiting or running:
            ready = frozenset(model for future, model in models.items() if future.done())
            job = next_job(waiting, len(free), ready, deadline - time.monotonic())
            if job is not None:
                waiting.remove(job)
                mine, free = free[: job.gpus], free[job.gpus :]
                running[workers.submit(run, job, mine)] = mine
                continue
            pending: set[Future[Any]] = {*running, *(future for future in models if not future.done())}
            if not pending:
                break
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in [future for future in running if future in done]:
                free += running.pop(future)
                future.result()
    return waiting
