"""One process for rewards, as the controller sees it: its connection, its current calls and their deadline."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.reward_worker import Progress
from rljob_trainer.tasks.scoring import RewardFailure
from rljob_trainer.tasks.user_code import raised

LOAD_SECONDS = 300.0
"""Time limit of a process's imports."""

_SECONDS_TO_DIE = 5.0
"""Between the end of a process's connection and its own."""


class StepResults(Protocol):
    """Receives the results of calls."""

    def set(self, index: int, result: float | RewardFailure) -> None: ...


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A call of the reward function."""

    record: dict[str, Any]
    completion: Completion
    step: StepResults
    index: int
    """Of the completion in the step."""


@dataclass(slots=True)
class RewardProcess:
    """One process, its connection and its current calls."""

    source: RewardSource
    log: Path | None
    loaded: bool = False
    calls: list[RewardCall] = field(default_factory=list)
    given_at: float = field(default_factory=time.monotonic)
    process: subprocess.Popen[bytes] = field(init=False)
    connection: Connection = field(init=False)
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        mine, its = socket.socketpair()
        shared = os.memfd_create("rljob-reward-progress")
        os.ftruncate(shared, Progress.SIZE_BYTES)
        output = (
            subprocess.DEVNULL
            if self.log is None
            else os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        )
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "rljob_trainer.tasks.reward_worker",
                    *map(str, (its.fileno(), shared, os.getpid())),
                ],
                pass_fds=(its.fileno(), shared),
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
        finally:
            its.close()
            if self.log is not None:
                os.close(output)
        self.progress = Progress(shared)
        os.close(shared)
        self.connection = Connection(mine.detach())
        with suppress(BrokenPipeError):
            self.connection.send(self.source)

    @property
    def idle(self) -> bool:
        return self.loaded and not self.calls

    def give(self, calls: list[RewardCall]) -> None:
        """Send the calls. Raises `BadInput` if a record cannot be sent."""
        self.calls, self.given_at = calls, time.monotonic()
        self.progress.begin(0)
        try:
            data = pickle.dumps([(call.record, call.completion) for call in calls])
        except BaseException as error:  # classes of the user
            raise BadInput(
                "expected records that can be pickled, since rewards are computed in other processes, found one that "
                f"{raised(error)}; use numbers, texts, lists and dicts"
            ) from error
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died, which the next `recv` finds
            self.connection.send_bytes(data)

    def deadline(self, timeout_seconds: float) -> float | None:
        """The time at which its call, or its start, is overdue; None while it is idle."""
        if not self.loaded:
            return self.load_deadline
        if not self.calls:
            return None
        _, begun = self.progress.read()
        return begun + timeout_seconds

    @property
    def load_deadline(self) -> float:
        """The time by which it must have loaded the function."""
        return self.given_at + LOAD_SECONDS

    def overdue_call(self, timeout_seconds: float) -> int | None:
        """The position, in its batch, of a call that has taken longer; None: no call has."""
        position, begun = self.progress.read()
        return position if self.calls and time.monotonic() >= begun + timeout_seconds else None

    def cause_of_death(self) -> str:
        """`by SIGSEGV`, of a process whose connection has closed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_SECONDS_TO_DIE)
        code = self.process.returncode
        if code is None:
            return "without an exit code"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def end(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
