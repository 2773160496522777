"""Causes in host memory and /dev/shm."""

from __future__ import annotations

from rljob_api.memory_failure import Activity, FailureKind
from rljob_memory.diagnosis.balance import Balance
from rljob_memory.diagnosis.causes.finding import Finding, Weight
from rljob_memory.diagnosis.growth import host_growth
from rljob_memory.sizes import human_bytes

_NEARLY_FULL = 0.95
_END = {FailureKind.KILLED: "killed by SIGKILL", FailureKind.LOST: "lost, perhaps killed by SIGKILL"}


def host_memory(balance: Balance) -> Finding | None:
    """The kernel, the kubelet, Ray's monitor and malloc report it.

    A bare SIGKILL (exit code 137, signal 9) is mostly the kernel's out-of-memory killer, but also a preemption, a
    failed liveness probe, or a person. Pinning host memory fails with the message of a full
    GPU: `CUDA error: out of memory`.
    """
    failure = balance.failure
    match failure.kind:
        case FailureKind.HOST:
            return Finding(Weight.CERTAIN, f"The memory of the host or of the container ran out{_host_sizes(balance)}")
        case FailureKind.KILLED | FailureKind.LOST:
            return _killed(balance)
        case FailureKind.UNFAMILIAR if failure.of_the_gpu is False:
            text = failure.text[:160]
            return Finding(Weight.LIKELY, f"A program reported a shortage of host memory: “{text}”")
        case FailureKind.OBJECT_STORE:
            return Finding(Weight.FAINT, "Ray's object store, a part of host memory, is full")
        case FailureKind.DRIVER | FailureKind.NCCL if failure.activity in (Activity.PINNING, Activity.SLEEP):
            pinned = "Pinning host memory failed; CUDA reports this with the error of a full GPU"
            return Finding(Weight.STRONG, pinned)
        case _:
            return None


def _is_nearly_full(used_bytes: int, limit_bytes: int) -> bool:
    """False if the limit is 0, which means unknown."""
    return used_bytes >= _NEARLY_FULL * limit_bytes > 0


def _killed(balance: Balance) -> Finding:
    """Distinguishes a kill by the kernel from others, by the container's numbers."""
    host, kind = balance.evidence.host, balance.failure.kind
    if host.oom_kills:
        weight = Weight.CERTAIN
        why = f"the kernel's out-of-memory killer has killed {host.oom_kills} in the container"
    elif _is_nearly_full(host.host_used_bytes, host.host_limit_bytes):
        weight, why = Weight.CERTAIN, "the container was at its memory limit"
    elif grown := host_growth(balance.evidence.series):
        series, trend = grown[0], grown[1].trend
        first, last = human_bytes(trend.first_bytes), human_bytes(trend.last_bytes)
        weight, why = Weight.STRONG, f"host memory in the log ({series.name}) grew from {first} to {last}"
    else:
        weight = Weight.FAINT if kind is FailureKind.LOST else Weight.LIKELY
        why = "the usual sender is the kernel, at the memory limit"
    known = {"used_bytes": host.host_used_bytes, "limit_bytes": host.host_limit_bytes, "oom_kills": host.oom_kills}
    numbers = {name: value for name, value in known.items() if value}
    return Finding(weight, f"A process was {_END[kind]}; {why}", numbers=numbers)


def _host_sizes(balance: Balance) -> str:
    sizes = {name: human_bytes(size) for name, size in balance.failure.sizes.items()}
    if {"used_bytes", "limit_bytes"} <= sizes.keys():
        return f": {sizes['used_bytes']} of {sizes['limit_bytes']} were in use"
    if "used_bytes" in sizes:
        return f": the killed process held {sizes['used_bytes']}"
    return f": {sizes['wanted_bytes']} more did not fit" if "wanted_bytes" in sizes else ""


_SHARED_MEMORY_MESSAGES = {
    FailureKind.SHARED_MEMORY: (Weight.CERTAIN, "/dev/shm is full"),
    FailureKind.SHARED_SEGMENT: (
        Weight.LIKELY,
        "NCCL could not create a segment in /dev/shm; the usual cause is a full /dev/shm",
    ),
    FailureKind.SEMAPHORE: (
        Weight.STRONG,
        "A semaphore, which is a file in /dev/shm, found no space left there",
    ),
    FailureKind.OBJECT_STORE: (Weight.STRONG, "Ray's object store in /dev/shm is full"),
}


def shared_memory(balance: Balance) -> Finding | None:
    """/dev/shm is full; in a container it has 64 MiB by default. NCCL, torch's data workers and Ray write there.

    Writing to a new page of a full /dev/shm causes a bus error; so does a damaged file mapping.
    """
    failure, host = balance.failure, balance.evidence.host
    wanted = failure.sizes.get("wanted_bytes")
    more = f": {human_bytes(wanted)} more did not fit" if wanted is not None else ""
    if known := _SHARED_MEMORY_MESSAGES.get(failure.kind):
        return Finding(known[0], f"{known[1]}{more}")
    if failure.kind is not FailureKind.BUS_ERROR:
        return None
    weight, why = Weight.STRONG, "the usual cause is a full /dev/shm"
    if host.shared_memory_bytes:
        used, size = host.shared_memory_used_bytes, host.shared_memory_bytes
        weight = Weight.CERTAIN if _is_nearly_full(used, size) else Weight.FAINT
        why = f"{human_bytes(used)} of /dev/shm's {human_bytes(size)} were in use"
    return Finding(weight, f"A process died of a bus error; {why}")
