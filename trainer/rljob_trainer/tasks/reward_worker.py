"""A process that computes rewards: `python -m rljob_trainer.tasks.reward_worker`, started by `reward_pool`.

It imports neither torch nor vLLM and sees no GPU. The controller kills it if a call takes too long.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from rljob_client.errors import BadInput
from rljob_trainer.tasks.scoring import RewardFailure, compute_rewards
from rljob_trainer.tasks.user_code import error_text

_PR_SET_PDEATHSIG = 1


def serve(connection: Connection) -> None:
    """Receive the source of the reward functions, then calls of one of them, until the connection closes.

    Sends None, or the message of a failure, once the functions are loaded; then the results of the calls.
    """
    try:
        source = connection.recv()
        rewards = source.load()
        # For processes that the function starts with multiprocessing, which have this import path.
        sys.path.append(str(source.manifest_directory.resolve()))
    except BaseException as error:  # user code may raise anything
        connection.send(str(error) if isinstance(error, BadInput) else error_text(error))
        return
    connection.send(None)
    while True:
        try:
            place, calls, timeout_seconds = connection.recv()
        except EOFError:
            return
        except BaseException as error:  # classes of the user
            connection.send(RewardFailure(f"could not get the record, which {error_text(error)}"))
            continue
        connection.send(compute_rewards(rewards[place], calls, timeout_seconds))


def _end_with(parent: int) -> None:
    """Have the kernel end this process with the controller, even if a call hangs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    descriptor, parent = map(int, sys.argv[1:])
    _end_with(parent)
    # A package has run this file as its main module: the messages hold classes of other modules only.
    serve(Connection(descriptor))
