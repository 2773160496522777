"""Selects the failure to explain: the first one of the last attempt that failed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rljob_memory.evidence.failure import DeviceMemory, Failure, FailureKind

_VAGUE = frozenset(
    {
        FailureKind.KILLED,
        FailureKind.LOST,
        FailureKind.NO_MESSAGE,
        FailureKind.BUS_ERROR,
        FailureKind.SHARED_SEGMENT,
        FailureKind.SEMAPHORE,
    }
)
_ALIKE = 0.1
"""Most difference between the tensors of ranks that do the same work."""
_ROUNDING = 0.006
"""A message gives two decimals: 1.00 GiB may be off by half a percent."""


def failure_to_explain(
    failures: Sequence[Failure], snapshots: Sequence[Failure], restarts: Sequence[float]
) -> Failure | None:
    """The first failure of the last attempt that failed; None if nothing failed.

    `snapshots`: failures that their processes recorded, which a log may contain as well. `restarts`: times when the job
    resumed after a failure, in seconds since the epoch: the starts of its attempts and the changes of its plan.
    """
    return first_failure(of_last_attempt(without_duplicates(failures, snapshots), restarts))


def without_duplicates(failures: Sequence[Failure], snapshots: Sequence[Failure]) -> list[Failure]:
    """All failures, each snapshot joined with the message of the same failure.

    The snapshot has the time and the allocator's layout, the message has the other processes.
    """
    remaining, joined = list(snapshots), []
    for failure in failures:
        same = next((snapshot for snapshot in remaining if _is_same(failure, snapshot)), None)
        if same is not None:
            remaining.remove(same)
            failure = _joined(failure, same)
        joined.append(failure)
    return joined + remaining


def of_last_attempt(failures: Sequence[Failure], restarts: Sequence[float]) -> list[Failure]:
    """The failures in the last stretch between two `restarts` that has any.

    If only some have a time, the others are left out.
    """
    bounds = sorted(restarts)
    stretches = [
        (bisect_right(bounds, failure.clock[1]), failure)
        for failure in failures
        if failure.clock and failure.clock[0] == "epoch"
    ]
    if not bounds or not stretches:
        return list(failures)
    last = max(stretch for stretch, _ in stretches)
    return [failure for stretch, failure in stretches if stretch == last]


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The failure that the others follow from: the earliest one if all have comparable times, else the first one.

    A failure that only reports that a process is gone gives way to one with a cause, and so does one that the engine
    reports again with more detail.
    """
    familiar = [failure for failure in failures if failure.kind is not FailureKind.UNFAMILIAR] or failures
    telling = [failure for failure in familiar if failure.kind not in _VAGUE] or familiar
    telling = [failure for number, failure in enumerate(telling) if not _is_herald(failure, telling[number + 1 :])]
    if not telling:
        return None
    first = telling[0]
    formats = {failure.clock[0] if failure.clock else None for failure in telling}
    if len(formats) == 1 and None not in formats:
        first = min(telling, key=lambda failure: failure.clock[1] if failure.clock else 0.0)
    # Ray reports that memory ran out in one line, and the sizes in the next.
    sizes = first.sizes or next((other.sizes for other in telling if other.kind is first.kind and other.sizes), {})
    alike = (other.activity for other in telling if other.activity and _is_alike(first, other))
    return first.changed(sizes=sizes, activity=first.activity or next(alike, None))


def _is_herald(failure: Failure, later: Sequence[Failure]) -> bool:
    """True if the engine reports the same failure again with its activity.

    cumem prints its error to stderr before anything is raised: without a traceback, so it does not show whether the
    engine was making its memory or mapping it again, and with the time of the line before it.
    """
    if failure.kind is not FailureKind.ENGINE_WAKE or failure.activity is not None:
        return False
    return any(other.source == failure.source and other.in_engine and other.activity is not None for other in later)


def _is_alike(one: Failure, other: Failure) -> bool:
    """True if both can be of ranks that do the same work: as full, on GPUs of the same size."""
    if one.kind is not other.kind or one.source != other.source or one.role != other.role:
        return False
    if not one.device or not other.device or one.device.total_bytes != other.device.total_bytes:
        return False
    held, others_held = one.device.allocated_bytes, other.device.allocated_bytes
    return held is not None and others_held is not None and abs(held - others_held) <= _ALIKE * held


def _is_same(message: Failure, snapshot: Failure) -> bool:
    """True if the numbers agree: three of them do not by chance."""
    if message.device is None or snapshot.device is None:
        return False
    pairs = [
        (getattr(message.device, name), getattr(snapshot.device, name))
        for name in ("requested_bytes", "allocated_bytes", "free_bytes")
    ]
    return all(a is not None and b is not None and abs(a - b) <= _ROUNDING * max(a, b) for a, b in pairs)


def _joined(message: Failure, snapshot: Failure) -> Failure:
    """The failure of a message, with the numbers of its GPU that only the snapshot has."""
    assert message.device is not None, "the numbers of both agree"
    assert snapshot.device is not None
    missing = {
        name: getattr(snapshot.device, name)
        for name in DeviceMemory.model_fields
        if getattr(message.device, name) in (None, [])
    }
    return message.changed(
        device=message.device.model_copy(update=missing),
        activity=message.activity or snapshot.activity,
        role=snapshot.role,
        rank=snapshot.rank,
        step=snapshot.step,
        phase=snapshot.phase or message.phase,
        micro_batch=snapshot.micro_batch,
        clock=snapshot.clock,
    )
