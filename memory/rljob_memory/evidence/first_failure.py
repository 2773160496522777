"""Of all failures that were found, the one to explain: the first of the last attempt that failed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import fields, replace

from rljob_memory.evidence.device_memory import DeviceMemory
from rljob_memory.evidence.failure import Failure, FailureKind

_VAGUE = frozenset({FailureKind.KILLED, FailureKind.UNSAID, FailureKind.BUS_ERROR, FailureKind.SHARED_SEGMENT})
_ROUNDING = 0.006
"""A message gives two decimals: 1.00 GiB may be off by half a percent."""


def failure_to_explain(
    failures: Sequence[Failure], snapshots: Sequence[Failure] = (), restarts: Sequence[float] = ()
) -> Failure | None:
    """`snapshots`: failures that a process wrote down itself, which its log may tell too. `restarts`: when the job went
    on after a failure, in seconds since the epoch: its attempts' starts and its plan's changes.

    None where nothing failed.
    """
    return first_failure(of_last_attempt(told_once(failures, snapshots), restarts))


def told_once(failures: Sequence[Failure], snapshots: Sequence[Failure]) -> list[Failure]:
    """Each snapshot joined with the message of the same failure: it has the time and the layout, the message has the
    other processes."""
    remaining, joined = list(snapshots), []
    for failure in failures:
        same = next((snapshot for snapshot in remaining if _is_same(failure, snapshot)), None)
        if same is not None:
            remaining.remove(same)
            failure = _joined(failure, same)
        joined.append(failure)
    return joined + remaining


def of_last_attempt(failures: Sequence[Failure], restarts: Sequence[float]) -> list[Failure]:
    """Those of the last stretch between two `restarts` that has any. Where some have no time, those that have count."""
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
    """The one that the others follow from: the earliest by the clock where all carry comparable times, else in order.

    One that only says that a process is gone gives way to one that says why, and so does what is told again.
    """
    telling = [failure for failure in failures if failure.kind not in _VAGUE] or failures
    telling = [failure for number, failure in enumerate(telling) if not _is_herald(failure, telling[number + 1 :])]
    if not telling:
        return None
    first = telling[0]
    formats = {failure.clock[0] if failure.clock else None for failure in telling}
    if len(formats) == 1 and None not in formats:
        first = min(telling, key=lambda failure: failure.clock[1] if failure.clock else 0.0)
    # Ray says that memory ran out in one line, and how much there was in the next.
    sizes = first.sizes or next((other.sizes for other in telling if other.kind is first.kind and other.sizes), {})
    return replace(first, sizes=sizes)


def _is_herald(failure: Failure, later: Sequence[Failure]) -> bool:
    """Whether the engine says more of the same failure later on.

    cumem prints its error to stderr by itself, before anything is raised: without a traceback, and so without a word of
    whether the engine was making its memory or mapping it again, and with the time of whatever was written before.
    """
    if failure.kind is not FailureKind.ENGINE_WAKE or failure.activity is not None:
        return False
    return any(other.source == failure.source and other.in_engine and other.activity is not None for other in later)


def _is_same(message: Failure, snapshot: Failure) -> bool:
    """Whether the numbers agree: three of them do not by chance."""
    if message.device is None or snapshot.device is None:
        return False
    pairs = [
        (getattr(message.device, name), getattr(snapshot.device, name))
        for name in ("requested_bytes", "allocated_bytes", "free_bytes")
    ]
    return all(a is not None and b is not None and abs(a - b) <= _ROUNDING * max(a, b) for a, b in pairs)


def _joined(message: Failure, snapshot: Failure) -> Failure:
    device = message.device
    if device and snapshot.device:
        missing = {
            field.name: getattr(snapshot.device, field.name)
            for field in fields(DeviceMemory)
            if getattr(device, field.name) in (None, ())
        }
        device = replace(device, **missing)
    return replace(
        message,
        device=device,
        activity=message.activity or snapshot.activity,
        role=snapshot.role,
        rank=snapshot.rank,
        step=snapshot.step,
        phase=snapshot.phase or message.phase,
        micro_batch=snapshot.micro_batch,
        clock=snapshot.clock,
    )
