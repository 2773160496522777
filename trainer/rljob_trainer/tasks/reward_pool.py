"""Computes rewards in separate processes, so that a slow or hanging reward function stops neither the job nor the
GPUs.

Process pools of libraries kill a worker without the processes that it has started, and start daemons, which cannot
start any.
"""

from __future__ import annotations

import math
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
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import psutil

from rljob_client.errors import BadInput
from rljob_memory.host_watch import is_nearly_full
from rljob_trainer.rollout_batch import Prompt
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.rewards import Response, Reward
from rljob_trainer.tasks.scoring import Result, RewardFailure, Scoring, timed_out
from rljob_trainer.tasks.user_code import error_text
from rljob_trainer.telemetry.host_memory import host_memory

_BACKLOG_SECONDS = 0.2
"""The number of workers doubles whenever calls have been waiting for this long."""

_LOOK_EVERY_SECONDS = 5.0
"""Between two looks at the memory of a worker."""

_LOAD_SECONDS = 300.0
"""Time limit of a worker's imports."""

_ROUNDS = 4
"""Calls of an async function that a worker receives at a time, by the number of them that it makes concurrently."""

_SECONDS_TO_CANCEL = 5.0
"""Seconds beyond the time limit after which a worker is killed whose event loop does not run."""

_SECONDS_TO_DIE = 5.0
"""Seconds between the end of a worker's connection and that of the worker."""


class RewardPool:
    """Workers that load the reward functions and call them. Each is served by a thread of its own.

    The pool starts with one worker, and grows while calls wait. A worker whose call exceeds the time limit is killed,
    with the processes that it has started, and replaced; so is one that dies. One that leaks is replaced between two
    calls. The calls of an async function that wait are made concurrently, by one worker at a time.
    """

    def __init__(
        self,
        source: RewardSource,
        rewards: Sequence[Reward],
        *,
        workers: int,
        timeout_seconds: float,
        log: Path | None = None,
    ) -> None:
        """`rewards`: what the source loads. `workers`: maximum number. `timeout_seconds`: limit of each call. `log`:
        receives the output of the functions."""
        self._source = source
        self._rewards = rewards
        self._concurrent = set[int]()
        """Places of the async functions that a worker is calling."""
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
        return Scoring(prompts, group_size, self._rewards, self._submit)

    def _submit(self, place: int, responses: list[Response]) -> Future[list[Result]]:
        call = _Call(place, responses)
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
            first = self._first_call()
            has_waited = first is not None and time.monotonic() - first.queued_at >= _BACKLOG_SECONDS
            if has_waited and sum(worker.loaded for worker in self._workers) == count:
                for _ in range(min(count, self._most_workers - count, len(self._calls))):
                    self._add_worker()
            self._watch_backlog()

    def _add_worker(self) -> None:
        self._threads.append(threading.Thread(target=self._serve, name="rewards", daemon=True))
        self._threads[-1].start()

    # --- the thread of one worker ---

    def _serve(self) -> None:
        worker, calls = None, list[_Call]()
        try:
            while not self._closing:
                if worker is None or not worker.alive or worker.leaks():
                    worker = self._started(worker)
                if calls := self._next_calls():
                    worker.make(calls, self._rewards[calls[0].place], self._timeout_seconds)
                    self._made(calls)
        except BaseException as error:
            for call in calls:
                if not call.result.done():
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

    def _next_calls(self) -> list[_Call]:
        """Wait for a call, or calls of one async function; none if the pool closes."""
        with self._changed:
            while not self._closing:
                if (call := self._first_call()) is None:
                    self._changed.wait()
                    continue
                if not (reward := self._rewards[call.place]).is_async:
                    self._calls.remove(call)
                    return [call]
                self._concurrent.add(call.place)
                same = (each for each in self._calls if each.place == call.place)
                taken = dict.fromkeys(islice(same, _ROUNDS * reward.concurrency))
                self._calls = deque(each for each in self._calls if each not in taken)
                return list(taken)
        return []

    def _first_call(self) -> _Call | None:
        """The first call that a worker can make."""
        return next((call for call in self._calls if call.place not in self._concurrent), None)

    def _made(self, calls: list[_Call]) -> None:
        if calls[0].place in self._concurrent:
            with self._changed:
                self._concurrent.discard(calls[0].place)
                self._changed.notify_all()

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._changed:
                if worker in self._workers:
                    self._workers.remove(worker)
            worker.end()


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call of a reward function."""

    place: int
    """Place of the function in the list of them."""
    responses: list[Response]
    result: Future[list[Result]] = field(default_factory=Future)
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

    def make(self, calls: list[_Call], reward: Reward, timeout_seconds: float) -> None:
        """Set the results of calls of `reward`. The worker is not `alive` afterwards if it died or exceeded the time
        limit."""
        place = calls[0].place
        try:
            data = pickle.dumps((place, [call.responses for call in calls], timeout_seconds))
        except BaseException as error:  # classes of the user
            unsent = BadInput(
                "expected records that can be pickled, since rewards are computed in other processes, found one "
                f"that {error_text(error)}; use numbers, strings, lists and dicts"
            )
            for call in calls:
                call.result.set_exception(unsent)
            return
        limit_seconds = timeout_seconds
        if reward.is_async:  # the worker itself ends each call at the limit
            limit_seconds = math.ceil(len(calls) / reward.concurrency) * timeout_seconds + _SECONDS_TO_CANCEL
        found: list[list[Result]] | RewardFailure
        try:
            self._connection.send_bytes(data)
            if self._connection.poll(limit_seconds):
                found = self._connection.recv()
                self._next_look = self._next_look or time.monotonic()
            else:
                self.alive, found = False, timed_out(timeout_seconds)
        except (EOFError, OSError):
            self.alive, found = False, RewardFailure(self._death())
        if isinstance(found, RewardFailure):
            result = 0.0 if reward.built_in.bounded and not self.alive else found
            found = [[result] * len(call.responses) for call in calls]
        for call, results in zip(calls, found, strict=True):
            call.result.set_result(results)

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
