"""Readable entries of the balances of a GPU and of the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rljob_memory.diagnosis.balance import Balance
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import FailureKind

_ACCOUNT, _MESSAGE = "the account of the process", "torch's message"
_DERIVED = "what is left of the total"
_ENGINES_LOG = "the engine's log"
_OF_THE_HOST = frozenset(
    {
        FailureKind.HOST,
        FailureKind.KILLED,
        FailureKind.SHARED_MEMORY,
        FailureKind.SHARED_SEGMENT,
        FailureKind.OBJECT_STORE,
    }
)
_DRIVER_SHARE = 0.02
"""Maximum share of the GPU that a driver keeps for itself."""


@dataclass(frozen=True, slots=True)
class BalanceEntry:
    """A part of a memory."""

    owner: str
    size_bytes: int
    source: str
    """The evidence that has the number."""
    is_part: bool = False
    """It is a part of the entry before it."""
    is_expected: bool = False
    """It is what the entry before it should be, by the size of the model."""


def gpu_entries(balance: Balance) -> list[BalanceEntry]:
    """The entries of the GPU, which add up to its memory if the message names it; empty without numbers.

    Parts and expectations belong to the entry above them, and do not count in the sum.
    """
    device = balance.failure.device
    if device is None:
        return _before_the_engine(balance)
    if device.allocated_bytes is None:
        return []
    source = _ACCOUNT if balance.failure.is_structured else _MESSAGE
    entries = [BalanceEntry("tensors of the failing process", device.allocated_bytes, source)]
    if balance.engine_is_in_the_process:
        entries.extend(_engine_parts(balance))
    if device.asleep_bytes:
        owner = "an engine that sleeps, whose memory is back with the GPU"
        entries.append(BalanceEntry(owner, device.asleep_bytes, source, is_part=True))
    if device.private_pool_bytes:
        entries.append(BalanceEntry("CUDA graphs", device.private_pool_bytes, source, is_part=True))
    entries.extend(_expectations(balance))
    if device.cached_bytes is not None:
        entries.append(BalanceEntry("torch's cache in it", device.cached_bytes, source))
    if (
        device.process_bytes
        and device.reserved_bytes
        and (outside_torch := device.process_bytes - device.reserved_bytes) > 0
    ):
        entries.append(BalanceEntry("its CUDA context, NCCL and libraries", outside_torch, source))
    named = sum(process.used_bytes for process in device.others)
    entries.extend(BalanceEntry(f"process {process.pid}", process.used_bytes, "NVML") for process in device.others)
    if (left := device.foreign_bytes - named) > 0:
        entries.append(_left_over(balance, left))
    if balance.engine_kv_cache_bytes and not balance.engine_is_in_the_process:
        entries.extend(_engine_parts(balance))
    if device.free_bytes is not None:
        entries.append(BalanceEntry("free", device.free_bytes, source))
    return entries


def _before_the_engine(balance: Balance) -> list[BalanceEntry]:
    """The GPU as an engine found it when it started, by its message."""
    total, free = (balance.failure.sizes.get(f"{name}_bytes") for name in ("total", "free"))
    if total is None or free is None or free > total:
        return []
    policy = min(balance.policy_reserved_bytes, total - free)
    held = [
        BalanceEntry("the policy's torch, at its last sample", policy, "the program's figures"),
        BalanceEntry("in use before the engine started", total - free - policy, _DERIVED),
    ]
    return [*(entry for entry in held if entry.size_bytes), BalanceEntry("free", free, "the engine's message")]


def _left_over(balance: Balance, left: int) -> BalanceEntry:
    """Memory that no number names an owner of: of the siblings, of strangers, or unexplained."""
    device, siblings = balance.failure.device, balance.evidence.siblings
    if balance.share(left) <= _DRIVER_SHARE:
        owner = "the driver"
    elif balance.engine_siblings:
        owner = f"engines of the same job ({', '.join(balance.engine_siblings)}), and the driver"
    elif siblings:
        owner = f"other processes of the same job ({', '.join(siblings)}), and the driver"
    elif balance.engine_kv_cache_bytes and not balance.engine_is_in_the_process:
        owner = "the engine, and the driver"
    elif device and device.process_bytes is not None:
        owner = "other processes, and the driver"
    else:
        owner = "unexplained: other processes, or this one outside torch"
    return BalanceEntry(owner, left, _DERIVED)


def _engine_parts(balance: Balance) -> Iterator[BalanceEntry]:
    engine = balance.evidence.engine
    named = (
        ("the engine's KV cache", balance.engine_kv_cache_bytes),
        ("the engine's weights", engine.weights_bytes),
        ("the engine's CUDA graphs", engine.graphs_bytes),
    )
    for owner, size in named:
        if size:
            yield BalanceEntry(owner, size, _ENGINES_LOG, is_part=True)


def _expectations(balance: Balance) -> Iterator[BalanceEntry]:
    """Expected bytes by the budget; else of one unsharded copy: a job that shards its model has a part of each."""
    if balance.budget is None and balance.failure.in_engine:
        return
    if balance.budget is None and balance.logits_bytes:
        source = "tokens of a micro-batch × vocabulary × 4"
        yield BalanceEntry("logits", balance.logits_bytes, source, is_expected=True)
    for line in balance.expected.lines if balance.expected else ():
        yield BalanceEntry(line.use, line.bytes, line.reason, is_expected=True)


def host_entries(evidence: CollectedEvidence) -> list[BalanceEntry]:
    """The entries of the host's or the container's memory; empty if the evidence shows nothing of it."""
    host, engine, failure = evidence.host, evidence.engine, evidence.failure
    sizes = failure.sizes if failure and failure.kind in _OF_THE_HOST else {}
    used = host.host_used_bytes or sizes.get("used_bytes", 0)
    limit = host.host_limit_bytes or sizes.get("limit_bytes", 0)
    resident = max((series.samples[-1].rss_bytes for series in evidence.series), default=0)
    named = (
        ("limit", limit, "the cgroup, or the message"),
        ("in use", used, "the cgroup, or the message"),
        ("a process, at its last sample", resident, "the program's figures"),
        ("weights of an engine that sleeps, pinned", engine.backed_up_bytes or 0, _ENGINES_LOG),
        ("/dev/shm in use", host.shared_memory_used_bytes, "df, or the memory log"),
        ("size of /dev/shm", host.shared_memory_bytes, "df, or the memory log"),
        ("request that failed", sizes.get("wanted_bytes", 0), "the message"),
    )
    return [BalanceEntry(owner, size, source) for owner, size, source in named if size]
