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
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil

from rljob_client.errors import BadInput
from rljob_memory.host_watch import is_nearly_full
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.scoring import Result, RewardFailure, Scoring
from rljob_trainer.tasks.user_code import error_text
from rljob_trainer.telemetry.host_memory import host_memory

_BACKLOG_SECONDS = 0.2
"""The number of workers doubles whenever calls have been waiting for this long."""

_LOOK_EVERY_SECONDS = 5.0
"""Between two looks at the memory of a worker."""

_LOAD_SECONDS = 300.0
"""Time limit of a worker's imports."""

_SECONDS_TO_DIE = 5.0
"""Seconds between the end of a worker's connection and that of the worker."""


class RewardPool:
    """Workers that load the reward function and call it. Each is served by a thread of its own.

    The pool starts with one worker, and grows while calls wait. A worker whose call exceeds the time limit is killed,
    with the processes that it has started, and replaced; so is one that dies. One that leaks is replaced between two
    calls.
    """

    def __init__(self, source: RewardSource, *, workers: int, timeout_seconds: float, log: Path | None = None) -> None:
        """`workers`: maximum number. `timeout_seconds`: limit of each call. `log`: receives the output of the
        function."""
        self._source = source
        self._most_workers = max(workers, 1)
        self._timeout_seconds = timeout_seconds
        self._log = log
        self._changed = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._threads: list[threading.Thread] = []
        self._workers: list[_Worker] = []
        self._timer: threading.Timer | None = None
        self._closing = False
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._add_worker()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers, idle or not."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            for worker in self._workers:
                worker.kill()
        for thread in self._threads:
            thread.join()

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        """The scoring of a step. Its results raise `BadInput` if the reward function cannot be loaded, or if a record
        cannot be pickled. Calls of an earlier step that have not begun are dropped."""
        with self._changed:
            self._calls.clear()
        return Scoring(prompts, group_size, self._submit)

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in list(self._workers)]

    def _submit(self, record: dict[str, Any], completion: Completion) -> Future[Result]:
        # The function sees the text; tokens would only be copied.
        call = _Call(record, replace(completion, token_ids=(), logprobs=()))
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
            self._watch_backlog()
        if self._error is not None:
            self._fail(self._error)
        return call.result

    def _watch_backlog(self) -> None:
        if self._timer is None and len(self._threads) < self._most_workers:
            self._timer = threading.Timer(_BACKLOG_SECONDS, self._grow)
            self._timer.daemon = True
            self._timer.start()

    def _grow(self) -> None:
        with self._changed:
            self._timer = None
            if self._closing or not self._calls:
                return
            count = len(self._threads)
            has_waited = time.monotonic() - self._calls[0].queued_at >= _BACKLOG_SECONDS
            if has_waited and sum(worker.loaded for worker in self._workers) == count:
                for _ in range(min(count, self._most_workers - count, len(self._calls))):
                    self._add_worker()
            self._watch_backlog()

    def _add_worker(self) -> None:
        self._threads.append(threading.Thread(target=self._serve, name="rewards", daemon=True))
        self._threads[-1].start()

    # --- the thread of one worker ---

    def _serve(self) -> None:
        worker, call = None, None
        try:
            while not self._closing:
                if worker is None or not worker.alive or worker.leaks():
                    worker = self._started(worker)
                if (call := self._next_call()) is not None:
                    worker.make(call, self._timeout_seconds)
        except BaseException as error:
            if call is not None and not call.result.done():
                call.result.set_exception(error)
            self._fail(error)
        finally:
            self._end(worker)

    def _fail(self, error: BaseException) -> None:
        """End all calls with the error, now and later."""
        with self._changed:
            self._error = self._error or error
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            call.result.set_exception(self._error)

    def _started(self, former: _Worker | None) -> _Worker:
        """A worker that has loaded the function, in place of `former`."""
        self._end(former)
        worker = _Worker(self._source, self._log)
        with self._changed:
            self._workers.append(worker)
            if self._closing:
                worker.kill()
        worker.wait_until_loaded()
        return worker

    def _next_call(self) -> _Call | None:
        """Wait for a call; None if the pool closes."""
        with self._changed:
            while not self._calls and not self._closing:
                self._changed.wait()
            return None if self._closing else self._calls.popleft()

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._changed:
                if worker in self._workers:
                    self._workers.remove(worker)
            worker.end()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the reward function."""

    record: dict[str, Any]
    completion: Completion
    result: Future[Result] = field(default_factory=Future)
    queued_at: float = field(default_factory=time.monotonic)
    """Time on the monotonic clock."""


def _resident_bytes(process: int) -> int:
    with suppress(psutil.Error):
        return int(psutil.Process(process).memory_info().rss)
    return 0


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
                # Printing must not fail in any locale.
                env={
                    "OMP_NUM_THREADS": "1",
                    "PYTHONIOENCODING": "utf-8:backslashreplace",
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                },
            )
        self._connection = Connection(own.detach())
        self._source = source
        self._first_bytes = 0
        """Resident memory after the first call, in which it may load a model."""
        self._next_look: float | None = None
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

    def make(self, call: _Call, timeout_seconds: float) -> None:
        """Set the result of the call. The worker is not `alive` afterwards if it died or exceeded the time limit."""
        try:
            data = pickle.dumps((call.record, call.completion))
        except BaseException as error:  # classes of the user
            call.result.set_exception(
                BadInput(
                    "expected records that can be pickled, since rewards are computed in other processes, found one "
                    f"that {error_text(error)}; use numbers, strings, lists and dicts"
                )
            )
            return
        try:
            self._connection.send_bytes(data)
            if self._connection.poll(timeout_seconds):
                call.result.set_result(self._connection.recv())
                self._next_look = self._next_look or time.monotonic()
                return
            failure = f"took more than {timeout_seconds:g} s (task.rewardTimeoutSeconds)"
        except (EOFError, OSError):
            failure = self._death()
        self.alive = False
        call.result.set_result(RewardFailure(failure))

    def leaks(self) -> bool:
        """True if its memory has doubled and the container is nearly full. It looks once in a while."""
        if self._next_look is None or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_EVERY_SECONDS
        used, container = _resident_bytes(self.process.pid), host_memory()
        self._first_bytes = self._first_bytes or used
        return used > 2 * self._first_bytes and is_nearly_full(container)

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
