"""Wait for calls to several actors at once. The first failure ends the wait and names its actor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rljob_memory.evidence.exception import failure_of_exception
from rljob_trainer.errors import HostOutOfMemory, PhaseDeadlineExceeded, SharedMemoryExhausted, TrainerError, WorkerLost
from rljob_trainer.roles.time_limit import GRACE_SECONDS, current_limit

Calls = dict[str, Any]
"""Ray object references by the name of the called actor, such as `policy-0`."""

_LOST_PEER_SECONDS = 5.0
"""The connections of a lost actor close at once and fail its peers. Ray reports the loss a little later."""


def wait_for(calls: Calls, doing: str, on_result: Callable[[str, Any], None] | None = None) -> dict[str, Any]:
    """The results by actor name. Raises the error of the first failing call.

    The loss of an actor does not end the calls of its peers, which may wait in a collective forever. Results are
    therefore taken as they arrive, and the first failure is raised at once. If it has no clear cause, such as a closed
    connection, the peers first get a few seconds to report theirs.

    Calls that exceed the current `time_limit` end the wait as well.

    `doing`: the activity for error messages, such as "updating". `on_result`: called with the name of an actor and its
    result as soon as that arrives.
    """
    import ray

    name_of = {reference: name for name, reference in calls.items()}
    results: dict[str, Any] = {}
    pending = list(name_of)
    limit = current_limit()
    while pending:
        seconds = None if limit is None else limit.seconds_left + GRACE_SECONDS
        arrived, pending = ray.wait(pending, num_returns=1, timeout=seconds)
        if limit is not None and not arrived:
            late = [name for reference, name in name_of.items() if reference in pending]
            raise PhaseDeadlineExceeded(
                f"{', '.join(late)} did not finish {doing} within {limit.seconds:.0f} s (recovery.phaseDeadlineSeconds)"
            ).of(late[0])
        [ready] = arrived
        try:
            name = name_of[ready]
            results[name] = _result(ready, name, doing)
            if on_result is not None:
                on_result(name, results[name])
        except TrainerError as failure:
            if _names_no_cause(failure):
                _raise_cause_among(pending, name_of, doing)
            raise
    return {name: results[name] for name in calls}


def all_returned(calls: Calls, *, within_seconds: float) -> bool:
    """True if all calls end in time, with a result or an error, and no actor is lost."""
    import ray
    from ray import exceptions

    ended, pending = ray.wait(list(calls.values()), num_returns=len(calls), timeout=within_seconds)
    for reference in ended:
        try:
            ray.get(reference)
        except exceptions.RayActorError:
            return False
        except exceptions.RayError:
            continue
    return not pending


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
