"""Computes rewards in separate processes, so that a slow or hanging reward function stops neither the job nor the
GPUs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self

from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.reward_process import LOAD_SECONDS, RewardCall, RewardProcess
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.scoring import RewardFailure, Scoring

_BATCH_SECONDS = 0.05
"""Calls that are expected to take this long together go to a worker at once."""

_LARGEST_BATCH = 64
_BACKLOG_SECONDS = 0.2
"""The number of workers doubles whenever calls have been waiting for this long."""


class RewardPool:
    """Workers that load the reward function and call it. Used from one thread; its own thread serves the workers.

    It starts with one worker, and grows while calls wait. A worker whose call exceeds the time limit is killed, with
    the processes that it has started, and replaced; so is one that dies.
    """

    def __init__(self, source: RewardSource, *, workers: int, timeout_seconds: float, log: Path | None = None) -> None:
        """`workers`: most of them. `timeout_seconds`: of each call. `log`: receives the output of the function."""
        self._source = source
        self._most_workers = max(workers, 1)
        self._timeout_seconds = timeout_seconds
        self._log = log
        self._lock = threading.Lock()
        self._queue: deque[RewardCall] = deque()
        self._step: _Step | None = None
        self._workers: list[RewardProcess] = []
        self._backlog_since: float | None = None
        self._call_seconds: float | None = None
        self._closing = False
        self._broken: BaseException | None = None
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name="rewards", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers, idle or not."""
        if self._closing:
            return
        self._closing = True
        self._rouse()
        self._thread.join()
        os.close(self._wake)
        os.close(self._woken)

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        """The scoring of a step. Calls of an earlier step that were not made yet are dropped."""
        with self._lock:
            self._queue.clear()
            self._step = _Step(self, prompts, group_size)
            return self._step

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in list(self._workers)]

    def put(self, calls: Sequence[RewardCall]) -> None:
        with self._lock:
            self._queue.extend(calls)
        self._rouse()

    def raise_if_broken(self) -> None:
        """Raise the error that ended the thread, if there was one."""
        if self._broken is not None:
            raise self._broken

    def _rouse(self) -> None:
        with suppress(BlockingIOError):  # it is awake
            os.write(self._wake, b"\0")

    # --- the thread that serves the workers ---

    def _serve(self) -> None:
        try:
            self._start_worker()
            while not self._closing:
                self._hand_out()
                self._grow()
                self._wait()
                self._end_overdue()
        except BaseException as error:
            self._fail(error)
        finally:
            for worker in self._workers:
                worker.end()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._broken = error
            if self._step is not None:
                self._step.notify()

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.idle and (batch := self._next_batch()):
                worker.give(batch)
        waiting = bool(self._queue) and any(worker.loaded for worker in self._workers)
        if not waiting:
            self._backlog_since = None
        elif self._backlog_since is None:
            self._backlog_since = time.monotonic()

    def _next_batch(self) -> list[RewardCall]:
        with self._lock:
            size = 1
            if self._call_seconds is not None:
                size = int(min(_BATCH_SECONDS / max(self._call_seconds, 1e-9), _LARGEST_BATCH))
            size = max(1, min(size, -(-len(self._queue) // self._most_workers)))
            return [self._queue.popleft() for _ in range(min(size, len(self._queue)))]

    def _grow(self) -> None:
        now = time.monotonic()
        if self._backlog_since is None or now - self._backlog_since < _BACKLOG_SECONDS:
            return
        self._backlog_since = now
        count = len(self._workers)
        for _ in range(min(2 * count, self._most_workers, count + len(self._queue)) - count):
            self._start_worker()

    def _start_worker(self) -> None:
        self._workers.append(RewardProcess(self._source, self._log))

    def _wait(self) -> None:
        by_connection = {worker.connection: worker for worker in self._workers}
        ready = wait([self._woken, *by_connection], timeout=self._seconds_to_wait())
        for each in ready:
            if isinstance(each, Connection):
                self._receive(by_connection[each])
            else:
                os.read(self._woken, 4096)

    def _seconds_to_wait(self) -> float | None:
        now = time.monotonic()
        deadlines = [worker.deadline(self._timeout_seconds) for worker in self._workers]
        if self._backlog_since is not None and len(self._workers) < self._most_workers:
            deadlines.append(self._backlog_since + _BACKLOG_SECONDS)
        finite = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(finite) - now) if finite else None

    def _receive(self, worker: RewardProcess) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            failure = f"ended its process {worker.cause_of_death()}"
            if not worker.loaded:
                raise BadInput(f"a process for rewards {failure} while it loaded the reward function") from None
            self._replace(worker, worker.progress.read()[0], failure)
            return
        if not worker.loaded:
            if message is not None:
                raise BadInput(f"a process for rewards cannot load the reward function: {message}")
            worker.loaded = True
            return
        calls, worker.calls = worker.calls, []
        if isinstance(message, RewardFailure):
            message = [message] * len(calls)
        seconds = (time.monotonic() - worker.given_at) / len(calls)
        known = self._call_seconds
        self._call_seconds = seconds if known is None else 0.8 * known + 0.2 * seconds
        for call, result in zip(calls, message, strict=True):
            call.step.set(call.index, result)

    def _end_overdue(self) -> None:
        for worker in list(self._workers):
            if worker.connection.poll():
                continue
            if worker.loaded:
                if (position := worker.overdue_call(self._timeout_seconds)) is not None:
                    failure = f"took more than {self._timeout_seconds:g} s (task.rewardTimeoutSeconds)"
                    self._replace(worker, position, failure)
            elif time.monotonic() >= worker.load_deadline:
                raise BadInput(
                    f"expected a process for rewards to load the reward function within {LOAD_SECONDS:.0f} s, "
                    "it did not; shorten the imports of its module"
                )

    def _replace(self, worker: RewardProcess, position: int, failure: str) -> None:
        """End the worker. Its call at `position` fails; the other calls of its batch are made by another worker."""
        with self._lock:
            for index, call in enumerate(worker.calls):
                if index == position:
                    call.step.set(call.index, RewardFailure(failure))
                else:
                    self._queue.appendleft(call)
        worker.end()
        self._workers.remove(worker)
        self._start_worker()


class _Step:
    """The results of one step."""

    def __init__(self, pool: RewardPool, prompts: Sequence[Prompt], group_size: int) -> None:
        self._pool, self._prompts, self._group_size = pool, prompts, group_size
        self._results: list[float | RewardFailure | None] = [None] * (len(prompts) * group_size)
        self._missing = 0
        self._changed = threading.Condition()
        self._has_failure = False

    def add(self, first: int, completions: Sequence[Completion]) -> None:
        with self._changed:
            self._missing += len(completions)
        self._pool.put(
            [
                # The function sees the text; tokens would only be copied.
                RewardCall(self._prompts[index // self._group_size].item, _without_tokens(completion), self, index)
                for index, completion in enumerate(completions, first)
            ]
        )

    def results(self, *, stop_at_failure: bool) -> list[float | RewardFailure | None]:
        with self._changed:
            while self._missing and not (stop_at_failure and self._has_failure):
                self._pool.raise_if_broken()
                self._changed.wait()
            return list(self._results)

    def set(self, index: int, result: float | RewardFailure) -> None:
        with self._changed:
            self._results[index] = result
            self._missing -= 1
            self._has_failure |= isinstance(result, RewardFailure)
            if not self._missing or self._has_failure:
                self._changed.notify()

    def notify(self) -> None:
        with self._changed:
            self._changed.notify()


def _without_tokens(completion: Completion) -> Completion:
    return replace(completion, token_ids=(), logprobs=())
