"""Wait for calls to several actors at once. The first failure ends the wait and names its actor."""

from __future__ import annotations

import time
from typing import Any

from rljob_memory.evidence.exception import failure_of_exception
from rljob_trainer.errors import HostOutOfMemory, SharedMemoryExhausted, TrainerError, WorkerLost

Calls = dict[str, Any]
"""Ray object references by the name of the called actor, such as `policy-0`."""

_LOST_PEER_SECONDS = 5.0
"""The connections of a lost actor close at once and fail its peers. Ray reports the loss a little later."""


def wait_for(calls: Calls, doing: str) -> dict[str, Any]:
    """The results by actor name. Raises the error of the first failing call.

    The loss of an actor does not end the calls of its peers, which may wait in a collective forever. Results are
    therefore taken as they arrive, and the first failure is raised at once. If it has no clear cause, such as a closed
    connection, the peers first get a few seconds to report theirs.

    `doing`: the activity for error messages, such as "updating".
    """
    import ray

    name_of = {reference: name for name, reference in calls.items()}
    results: dict[str, Any] = {}
    pending = list(name_of)
    while pending:
        [ready], pending = ray.wait(pending, num_returns=1)
        try:
            results[name_of[ready]] = _result(ready, name_of[ready], doing)
        except TrainerError as failure:
            if _names_no_cause(failure):
                _raise_cause_among(pending, name_of, doing)
            raise
    return {name: results[name] for name in calls}


def _names_no_cause(failure: TrainerError) -> bool:
    return type(failure) is TrainerError


def _raise_cause_among(pending: list[Any], name_of: dict[Any, str], doing: str) -> None:
    """Raise the error of a peer that fails within a few seconds with a clear cause: lost, or out of memory."""
    import ray

    deadline = time.monotonic() + _LOST_PEER_SECONDS
    while pending and (seconds_left := deadline - time.monotonic()) > 0:
        ended, pending = ray.wait(pending, num_returns=1, timeout=seconds_left)
        for reference in ended:
            try:
                _result(reference, name_of[reference], doing)
            except TrainerError as failure:
                if not _names_no_cause(failure):
                    raise


def _result(reference: Any, name: str, doing: str) -> Any:
    import ray
    from ray import exceptions

    try:
        return ray.get(reference)
    except exceptions.RayTaskError as error:
        if isinstance(error.cause, TrainerError):
            raise error.cause.of(error.cause.actor or name) from None
        failure = TrainerError(f"{name} failed while {doing}: {type(error.cause).__name__}: {error.cause}")
        raise failure.of(name) from error
    except exceptions.OutOfMemoryError as error:
        low = HostOutOfMemory(f"Ray killed {name} while {doing}, because its machine ran low on memory")
        low.out_of_memory = failure_of_exception(error)
        raise low.of(name) from error
    except exceptions.ObjectStoreFullError as error:
        full = SharedMemoryExhausted(f"Ray's object store in /dev/shm is full while {doing}: {error}")
        full.out_of_memory = failure_of_exception(error)
        raise full.of(name) from error
    except exceptions.RayActorError as error:
        raise WorkerLost(f"{name} died while {doing}").of(name) from error
