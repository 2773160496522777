"""Wait for calls to several actors at once. The first failure ends the wait and names its actor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from rljob_client.errors import BadInput, RunError
from rljob_memory.evidence.exception import account_of
from rljob_trainer.errors import HostOutOfMemory, PhaseDeadlineExceeded, SharedMemoryExhausted, WorkerLost
from rljob_trainer.roles.actor import is_repeatable
from rljob_trainer.roles.time_limit import GRACE_SECONDS, current_limit

Calls = dict[str, Any]
"""Ray object references by the name of the called actor, such as `policy-0`."""

_LOST_PEER_SECONDS = 15.0
"""The connections of a lost actor close immediately and fail its peers. Ray reports the loss a little later."""


class Served(Protocol):
    """Work of other actors that continues during a wait."""

    def pending(self) -> Calls:
        """Its calls without a result yet."""

    def serve(self, name: str) -> None:
        """Take the result of one of them, which has arrived. Raises no `RunError`."""


_served: ContextVar[Served | None] = ContextVar("served", default=None)


@contextmanager
def serving(work: Served | None) -> Iterator[None]:
    """Serve `work` whenever the block waits for calls. None: nothing."""
    token = _served.set(work)
    try:
        yield
    finally:
        _served.reset(token)


def wait_for(calls: Calls, doing: str) -> dict[str, Any]:
    """The results by actor name. Raises the error of the first failing call, as `next_result`."""
    pending, results = dict(calls), {}
    while pending:
        name, results[name] = next_result(pending, doing)
        del pending[name]
    return {name: results[name] for name in calls}


def next_result(calls: Calls, doing: str) -> tuple[str, Any]:
    """Wait for the first of several calls to end: the name of its actor, and its result. Raises its error.

    The loss of an actor does not end the calls of its peers, which may wait in a collective forever. Results are
    therefore taken as they arrive, and the first failure is raised at once. If it has no clear cause, such as a closed
    connection, the peers first get some seconds to report theirs.

    Calls that exceed the current `time_limit` end the wait as well.

    `doing`: the activity for error messages, such as "updating".
    """
    import ray

    name_of = {reference: name for name, reference in calls.items()}
    limit, served = current_limit(), _served.get()
    while True:
        others = {} if served is None else {reference: name for name, reference in served.pending().items()}
        seconds = None if limit is None else limit.seconds_left + GRACE_SECONDS
        arrived, _ = ray.wait([*name_of, *others], num_returns=1, timeout=seconds)
        if not arrived:
            assert limit is not None
            late = list(calls)
            raise PhaseDeadlineExceeded(
                f"{', '.join(late)} did not finish {doing} within {limit.seconds:.0f} s (recovery.phaseDeadlineSeconds)"
            ).of(late[0])
        [ready] = arrived
        if ready in name_of:
            break
        if served is not None:
            served.serve(others[ready])
    try:
        return name_of[ready], result_of(ready, name_of[ready], doing)
    except RunError as failure:
        if _names_no_cause(failure):
            _raise_cause_among([reference for reference in name_of if reference != ready], name_of, doing)
        raise


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


def _names_no_cause(failure: RunError) -> bool:
    return type(failure) is RunError or failure.raised is not None


def _raise_cause_among(pending: list[Any], name_of: dict[Any, str], doing: str) -> None:
    """Raise the error of a peer that fails within some seconds with a clear cause: lost, or out of memory."""
    import ray

    deadline = time.monotonic() + _LOST_PEER_SECONDS
    while pending and (seconds_left := deadline - time.monotonic()) > 0:
        ended, pending = ray.wait(pending, num_returns=1, timeout=seconds_left)
        for reference in ended:
            try:
                result_of(reference, name_of[reference], doing)
            except RunError as failure:
                if not _names_no_cause(failure):
                    raise


def result_of(reference: Any, name: str, doing: str) -> Any:
    """The result of a call that has ended. Raises a `RunError` if it has failed."""
    import ray
    from ray import exceptions

    try:
        return ray.get(reference)
    except exceptions.RayTaskError as error:
        if isinstance(error.cause, BadInput) and error.cause.raised:
            refused = BadInput(f"{name} failed while {doing}: {error.cause}").of(error.cause.actor or name)
            refused.raised = error.cause.raised
            raise refused from None
        if isinstance(error.cause, RunError):
            raise error.cause.of(error.cause.actor or name) from None
        kind = type(error.cause).__name__
        failure = RunError(f"{name} failed while {doing}: {kind}: {error.cause}")
        if is_repeatable(error.cause):
            message = f": {error.cause}" if kind == "RuntimeError" else ""  # many causes have this type
            failure.raised = f"{kind} while {doing}{message}"
        raise failure.of(name) from error
    except exceptions.OutOfMemoryError as error:
        low = HostOutOfMemory(f"Ray killed {name} while {doing}, because its machine ran low on memory")
        low.out_of_memory = account_of(error)
        raise low.of(name) from error
    except exceptions.ObjectStoreFullError as error:
        full = SharedMemoryExhausted(f"Ray's object store in /dev/shm is full while {doing}: {error}")
        full.out_of_memory = account_of(error)
        raise full.of(name) from error
    except (exceptions.RayActorError, exceptions.ObjectLostError) as error:  # the latter: its result was on a lost node
        raise WorkerLost(f"{name} died while {doing}").of(name) from error
