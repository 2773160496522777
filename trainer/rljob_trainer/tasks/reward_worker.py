"""A process that computes rewards: `python -m rljob_trainer.tasks.reward_worker`, started by `reward_pool`.

It imports neither torch nor vLLM and sees no GPU. The controller kills it if a call takes too long.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from rljob_client.errors import BadInput
from rljob_trainer.tasks.scoring import RewardFailure, compute_reward
from rljob_trainer.tasks.user_code import raised

_PR_SET_PDEATHSIG = 1


class Progress:
    """The call that a worker is in, in memory that it shares with the controller."""

    SIZE_BYTES = 16

    def __init__(self, descriptor: int) -> None:
        # Items of memoryviews are written whole. `struct.pack_into` zeroes a number first, which the controller would
        # take for a call that began when the machine did.
        memory = memoryview(mmap.mmap(descriptor, self.SIZE_BYTES))
        self._position, self._begun = memory[:8].cast("q"), memory[8:].cast("d")

    def begin(self, position: int) -> None:
        """The call at `position` of its batch begins."""
        self._begun[0] = time.monotonic()
        self._position[0] = position

    def read(self) -> tuple[int, float]:
        """Position of the call, and the time of its start by the machine's monotonic clock."""
        return self._position[0], self._begun[0]


def serve(connection: Connection, progress: Progress) -> None:
    """Receive the source of the reward function, then batches of calls, until the connection closes.

    Sends None, or the message of a failure, once the function is loaded; then the results of each batch.
    """
    try:
        source = connection.recv()
        reward = source.load()
        # For processes that the function starts with multiprocessing, which have this import path.
        sys.path.append(str(source.manifest_directory.resolve()))
    except BaseException as error:  # user code may raise anything
        connection.send(str(error) if isinstance(error, BadInput) else raised(error))
        return
    connection.send(None)
    while True:
        results = []
        try:
            calls = connection.recv()
        except EOFError:
            return
        except BaseException as error:  # classes of the user
            connection.send(RewardFailure(f"could not get the record, which {raised(error)}"))
            continue
        for position, (record, completion) in enumerate(calls):
            progress.begin(position)
            results.append(compute_reward(reward, record, completion))
        connection.send(results)


def _end_with(parent: int) -> None:
    """Have the kernel end this process with the controller, even if a call hangs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    connection_descriptor, progress_descriptor, parent = map(int, sys.argv[1:])
    _end_with(parent)
    # A package has run this file as its main module: the messages hold classes of other modules only.
    serve(Connection(connection_descriptor), Progress(progress_descriptor))
