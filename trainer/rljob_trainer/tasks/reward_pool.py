"""Computes rewards in separate processes, so that a slow or hanging reward function stops neither the job nor the
GPUs.

Process pools of libraries kill a worker without the processes that it has started, and start daemons, which cannot
start any.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.scoring import RewardFailure, Scoring
from rljob_trainer.tasks.user_code import raised

_BACKLOG_SECONDS = 0.2
"""The number of workers doubles whenever calls have been waiting for this long."""

_LOAD_SECONDS = 300.0
"""Time limit of a worker's imports."""

_SECONDS_TO_DIE = 5.0
"""Between the end of a worker's connection and its own."""


class RewardPool:
    """Workers that load the reward function and call it. Each is served by a thread of its own.

    The pool starts with one worker, and grows while calls wait. A worker whose call exceeds the time limit is killed,
    with the processes that it has started, and replaced; so is one that dies.
    """

    def __init__(self, source: RewardSource, *, workers: int, timeout_seconds: float, log: Path | None = None) -> None:
        """`workers`: most of them. `timeout_seconds`: of each call. `log`: receives the output of the function."""
        self._source = source
        self._most_workers = max(workers, 1)
        self._timeout_seconds = timeout_seconds
        self._log = log
        lock = threading.Lock()
        self._called, self._answered = threading.Condition(lock), threading.Condition(lock)
        self._calls: deque[_Call] = deque()
        self._backlog_since = 0.0
        self._threads: list[threading.Thread] = []
        self._workers: list[_Worker] = []
        self._closing = False
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._add_workers(1)
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers, idle or not."""
        with self._called:
            self._closing = True
            self._called.notify_all()
            for worker in self._workers:
                worker.kill()
        for thread in self._threads:
            thread.join()

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        """The scoring of a step. Calls of an earlier step that were not made yet are dropped."""
        with self._called:
            self._calls.clear()
        return _Step(self, prompts, group_size)

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in list(self._workers)]

    def put(self, step: _Step, calls: Sequence[_Call]) -> None:
        """Have the workers make calls of `step`."""
        with self._called:
            if not self._calls:
                self._backlog_since = time.monotonic()
            step.missing += len(calls)
            self._calls.extend(calls)
            self._called.notify(len(calls))
        self._grow()

    def wait_for(self, step: _Step, *, stop_at_failure: bool) -> list[float | RewardFailure | None]:
        """As `Scoring.results`. Raises `BadInput` if the function cannot be loaded, or a record cannot be pickled."""
        while True:
            with self._answered:
                if not step.missing or (stop_at_failure and step.has_failure):
                    return list(step.found)
                if self._error is not None:
                    raise self._error
                self._answered.wait(_BACKLOG_SECONDS)
            self._grow()

    def _grow(self) -> None:
        now = time.monotonic()
        with self._called:
            count = len(self._threads)
            if len(self._workers) < count or not all(worker.loaded for worker in self._workers):
                self._backlog_since = now
            if not self._calls or now - self._backlog_since < _BACKLOG_SECONDS:
                return
            self._backlog_since = now
            more = min(2 * count, self._most_workers, count + len(self._calls)) - count
        self._add_workers(more)

    def _add_workers(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
            self._threads.append(thread)
            thread.start()

    # --- the thread of one worker ---

    def _serve(self) -> None:
        worker = None
        try:
            while not self._closing:
                if worker is None or not worker.alive:
                    worker = self._started(worker)
                if (call := self._next_call()) is None:
                    return
                result = worker.call(call, self._timeout_seconds)
                with self._answered:
                    call.step.set(call.index, result)
                    self._answered.notify_all()
        except BaseException as error:
            with self._answered:
                self._error = self._error or error
                self._answered.notify_all()
        finally:
            self._end(worker)

    def _started(self, former: _Worker | None) -> _Worker:
        """A worker that has loaded the function, in place of `former`."""
        self._end(former)
        worker = _Worker(self._source, self._log)
        with self._called:
            self._workers.append(worker)
            if self._closing:
                worker.kill()
        worker.wait_until_loaded()
        return worker

    def _next_call(self) -> _Call | None:
        """Wait for a call; None if the pool closes."""
        with self._called:
            while not self._calls and not self._closing:
                self._called.wait()
            return None if self._closing else self._calls.popleft()

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._called:
                if worker in self._workers:
                    self._workers.remove(worker)
            worker.end()


@dataclass(slots=True)
class _Step:
    """The results of one step. Guarded by the lock of the pool."""

    pool: RewardPool
    prompts: Sequence[Prompt]
    group_size: int
    found: list[float | RewardFailure | None] = field(init=False)
    missing: int = 0
    has_failure: bool = False

    def __post_init__(self) -> None:
        self.found = [None] * (len(self.prompts) * self.group_size)

    def add(self, first: int, completions: Sequence[Completion]) -> None:
        # The function sees the text; tokens would only be copied.
        texts = [replace(completion, token_ids=(), logprobs=()) for completion in completions]
        self.pool.put(
            self,
            [
                _Call(self.prompts[index // self.group_size].item, completion, self, index)
                for index, completion in enumerate(texts, first)
            ],
        )

    def results(self, *, stop_at_failure: bool) -> list[float | RewardFailure | None]:
        return self.pool.wait_for(self, stop_at_failure=stop_at_failure)

    def set(self, index: int, result: float | RewardFailure) -> None:
        self.found[index] = result
        self.missing -= 1
        self.has_failure |= isinstance(result, RewardFailure)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the reward function."""

    record: dict[str, Any]
    completion: Completion
    step: _Step
    index: int
    """Of the completion in the step."""


class _Worker:
    """A process that runs `reward_worker`."""

    def __init__(self, source: RewardSource, log: Path | None) -> None:
        own, its = socket.socketpair()
        output = open(log or os.devnull, "ab")  # noqa: SIM115
        with its, output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rljob_trainer.tasks.reward_worker", str(its.fileno()), str(os.getpid())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Its own group, so that processes that the function has started end with it.
                start_new_session=True,
                # What the function prints must not make it fail, whatever the locale.
                env={
                    "OMP_NUM_THREADS": "1",
                    "PYTHONIOENCODING": "utf-8:backslashreplace",
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                },
            )
        self._connection = Connection(own.detach())
        self._source = source
        self.loaded = False
        self.alive = True

    def wait_until_loaded(self) -> None:
        """Have it load the reward function. Raises `BadInput` if it cannot."""
        try:
            self._connection.send(self._source)
            if not self._connection.poll(_LOAD_SECONDS):
                raise BadInput(
                    f"expected a process for rewards to load the reward function within {_LOAD_SECONDS:.0f} s, "
                    "it did not; shorten the imports of its module"
                )
            message = self._connection.recv()
        except (EOFError, OSError):
            raise BadInput(f"a process for rewards {self._death()} while it loaded the reward function") from None
        if message is not None:
            raise BadInput(f"a process for rewards cannot load the reward function: {message}")
        self.loaded = True

    def call(self, call: _Call, timeout_seconds: float) -> float | RewardFailure:
        """The result. The worker is not `alive` afterwards if it died or exceeded the time limit.

        Raises `BadInput` if the record cannot be pickled.
        """
        try:
            data = pickle.dumps((call.record, call.completion))
        except BaseException as error:  # classes of the user
            raise BadInput(
                "expected records that can be pickled, since rewards are computed in other processes, found one that "
                f"{raised(error)}; use numbers, texts, lists and dicts"
            ) from error
        try:
            self._connection.send_bytes(data)
            if self._connection.poll(timeout_seconds):
                result: float | RewardFailure = self._connection.recv()
                return result
            failure = f"took more than {timeout_seconds:g} s (task.rewardTimeoutSeconds)"
        except (EOFError, OSError):
            failure = self._death()
        self.alive = False
        return RewardFailure(failure)

    def kill(self) -> None:
        """Kill the process and those that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        self.process.wait()
        self._connection.close()

    def _death(self) -> str:
        """`ended its process by SIGSEGV`, of a process whose connection has closed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_SECONDS_TO_DIE)
        code = self.process.returncode
        if code is None:
            return "ended its process without an exit code"
        return f"ended its process {f'by {signal.Signals(-code).name}' if code < 0 else f'with exit code {code}'}"
