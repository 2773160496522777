"""Causes beyond the process: other processes, contexts, limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from rljob_api.memory_failure import DeviceMemory, FailureKind, GpuProcess
from rljob_memory.budget.others import LARGEST_CONTEXT_BYTES
from rljob_memory.diagnosis.balance import Balance, is_context
from rljob_memory.diagnosis.causes.finding import Finding, Weight
from rljob_memory.sizes import GIB, human_bytes

_MUCH = 0.2
"""Share of the GPU from which other processes are a likely cause."""
_MUCH_AT_START = 0.1
"""Share of the GPU that is more than the driver and the engine's CUDA context take before the engine starts."""
_TABLE_FULL = 0.9
"""Share in use from which a table of `nvidia-smi` shows a full GPU."""
_LARGE_PROCESS_BYTES = 4 * GIB
"""Memory from which a process in such a table is too large for a bare CUDA context."""
_FINDINGS_OF_ENGINE_CHECKS = {
    FailureKind.ENGINE_UNBALANCED: (
        Weight.LIKELY,
        "Before the engine loaded anything, one of its GPUs had much less free memory than the others",
    ),
    FailureKind.ENGINE_PROFILING: (
        Weight.LIKELY,
        "Another process released GPU memory while the engine was measuring how much it needs",
    ),
    FailureKind.ENGINE_SLEEP: (
        Weight.FAINT,
        "Another process took GPU memory while the engine was going to sleep",
    ),
}


def foreign_process(balance: Balance) -> Finding | None:
    """Memory that is neither free nor the failing process's own.

    The numbers do not identify the process: NVML's pids are the host's, and inside a pod the other process may be the
    job's own engine or policy.
    """
    failure = balance.failure
    if failure.kind in _FINDINGS_OF_ENGINE_CHECKS:
        return Finding(*_FINDINGS_OF_ENGINE_CHECKS[failure.kind])
    match failure.kind:
        case FailureKind.ALLOCATOR:
            return _outside_torch(balance)
        case FailureKind.ENGINE_START:
            return _before_the_engine(balance)
        case FailureKind.DRIVER | FailureKind.MATH_LIBRARY:
            return _in_nvidia_smi_table(balance)
        case _:
            return None


def _outside_torch(balance: Balance) -> Finding | None:
    failure, evidence, device = balance.failure, balance.evidence, balance.device
    if evidence.siblings:
        return None  # other processes of the job use GPUs: they are not foreign
    policy = balance.policy_next_to_engine_bytes
    engine = 0 if balance.engine_is_in_the_process else balance.engine_bytes
    foreign = balance.foreign_bytes(known_bytes=policy + engine)
    if device is None or not device.total_bytes or not foreign:
        return None
    if foreign - balance.contexts_bytes < balance.contexts_bytes:
        return None
    share = balance.share(foreign)
    weight = Weight.STRONG if share >= _MUCH or balance.others_exceed_the_budget else Weight.POSSIBLE
    excess = foreign
    if _started_together(device):
        weight = Weight.FAINT
    if share < _MUCH and balance.has_a_cache_instead:
        weight, excess = Weight.FAINT, 0
    by_an_engine = not evidence.engines_apart and (evidence.engine.seen or failure.role is not None)
    if failure.in_engine and not evidence.shows_a_trainer and evidence.plan is None:
        by_an_engine = False  # it is the engine, and nothing shows a trainer next to it
    if evidence.siblings is not None:
        by_an_engine = False  # the process knows that no other process of its container uses a GPU
    if by_an_engine and not (balance.engine_holds_little and foreign > balance.sleeping_engine_bytes):
        weight = Weight.FAINT
    of_policy = f", in addition to {human_bytes(policy)} of the policy" if policy else ""
    return Finding(
        weight,
        f"{human_bytes(foreign)} of the GPU's {human_bytes(device.total_bytes)} were held by other processes"
        f"{of_policy}; {human_bytes(device.requested_bytes)} more did not fit",
        excess,
        {"other_processes_bytes": foreign},
    )


def _before_the_engine(balance: Balance) -> Finding | None:
    if balance.evidence.shows_a_trainer or balance.evidence.siblings:
        return None  # its own model fills the GPU before its engine starts
    free, total = (balance.failure.sizes.get(f"{name}_bytes") for name in ("free", "total"))
    if not total or free is None or total - free - balance.policy_reserved_bytes < _MUCH_AT_START * total:
        return None
    used = total - free
    message = f"Before the engine started, {human_bytes(used)} of the GPU's {human_bytes(total)} were in use"
    return Finding(Weight.LIKELY, message, used, {"other_processes_bytes": used})


def _in_nvidia_smi_table(balance: Balance) -> Finding | None:
    """A message without numbers, and a table in which a GPU is full: it may also show the failing process itself."""
    failure, evidence = balance.failure, balance.evidence
    if failure.activity or failure.in_engine or evidence.shows_a_trainer:
        return None
    if evidence.gpu_use:
        used, total = max(evidence.gpu_use, key=lambda gpu: gpu[0] / gpu[1])
        shown = f"The log shows a GPU with {human_bytes(used)} of {human_bytes(total)} in use"
        return Finding(Weight.POSSIBLE, shown, used) if used >= _TABLE_FULL * total else None
    for gpu, processes in evidence.gpu_processes.items():
        sizes = sorted(process.used_bytes for process in processes)
        if len(sizes) > 1 and sizes[-1] >= _LARGE_PROCESS_BYTES and sizes[0] <= LARGEST_CONTEXT_BYTES:
            held = f"A process holds {human_bytes(sizes[-1])} of GPU {gpu}, next to one with {human_bytes(sizes[0])}"
            return Finding(Weight.FAINT, held, sizes[-1])
    return None


_SMALL_SHARE = 0.05
"""Share of the GPU below which contexts do not explain the failure of a request that is larger than all of them."""
_ONE_SHARE = 0.02
"""The same for a single context: a monitoring program has one too."""
_MUCH_OF_RANKS, _MOST_OF_RANKS = 0.1, 0.4
"""Shares of the GPU from which memory of other ranks is a possible and a likely cause."""
_ALIKE = 1.25
"""Largest ratio of the contexts of one program. Other ratios are those of unrelated programs, as on a desktop."""


def controller_context(balance: Balance) -> Finding | None:
    """Processes that only touched the GPU each hold a CUDA context on it."""
    failure, device = balance.failure, balance.device
    foreign = balance.foreign_bytes()
    if balance.shares_with_ranks_only and balance.share(foreign) >= _MUCH_OF_RANKS and not failure.in_engine:
        return Finding(
            Weight.LIKELY if balance.share(foreign) >= _MOST_OF_RANKS else Weight.POSSIBLE,
            f"{human_bytes(foreign)} of the GPU belonged to other processes of the same job "
            f"({', '.join(balance.evidence.siblings or ())}), none of them an engine: each rank should work on a GPU "
            "of its own",
            foreign,
            {"other_processes_bytes": foreign},
        )
    if device is not None and device.others:
        return _contexts_of_message(balance, device)
    if failure.kind in (FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL):
        processes = balance.evidence.gpu_processes.get(0, ())
        contexts = [process for process in processes if is_context(process)]
        if len(contexts) > 1 and len(contexts) < len(processes):
            return contexts_on(Weight.LIKELY, 0, contexts)
    return None


def _contexts_of_message(balance: Balance, device: DeviceMemory) -> Finding | None:
    contexts = [process for process in device.others if is_context(process)]
    held = sum(process.used_bytes for process in contexts)
    if not contexts or (balance.engine_holds_little and len(contexts) == 1):
        return None
    is_small = held < device.requested_bytes and balance.share(held) < _SMALL_SHARE
    if is_small and len(contexts) == 1 and balance.share(held) < _ONE_SHARE:
        return None
    if _started_together(device):
        found = contexts_on(Weight.STRONG, device.gpu or 0, contexts)
        ranks = "next to a rank that works on it: their process IDs follow each other, as those of one launcher do"
        return replace(found, message=f"{found.message}, {ranks}", excess_bytes=balance.total_bytes)
    suffices = (device.free_bytes or 0) + held >= device.requested_bytes
    others = sum(process.used_bytes for process in device.others) - held
    sizes = sorted(process.used_bytes for process in contexts)
    alike = any(larger <= _ALIKE * smaller for smaller, larger in pairwise(sizes))
    explains = suffices and others <= held and not is_small and alike
    return contexts_on(Weight.STRONG if explains else Weight.FAINT, device.gpu or 0, contexts)


def _started_together(device: DeviceMemory) -> bool:
    """True if the process IDs of the others follow each other, as those of ranks that one launcher has started.

    One of them works on the GPU; the failing process and the rest are on it with little more than their contexts. One
    ID may be missing: that of the failing process, which its message does not print.
    """
    ids = sorted(process.pid for process in device.others)
    contexts = sum(is_context(process) for process in device.others)
    if contexts < 2 or contexts != len(ids) - 1 or not 0 < (device.process_bytes or 0) <= LARGEST_CONTEXT_BYTES:
        return False
    return ids[-1] - ids[0] <= len(ids)


def contexts_on(weight: Weight, gpu: int, contexts: list[GpuProcess]) -> Finding:
    count, held = len(contexts), sum(process.used_bytes for process in contexts)
    processes = "Another process holds" if count == 1 else f"{count} other processes hold"
    message = f"{processes} {human_bytes(held)} on GPU {gpu}, about the size of a bare CUDA context each"
    return Finding(weight, message, held, {"context_processes": count, "contexts_bytes": held})


_BELOW_THE_GPU = 0.99
"""Share of the GPU below which a limit is a real one: torch prints a limit even if the process may use all memory."""
_AT_THE_LIMIT = 0.98
"""Share of the limit from which the process has reached it."""


def gpu_memory_limit(balance: Balance) -> Finding | None:
    """The process has a limit below the GPU's memory: a fraction set in torch, or a share set from outside.

    Libraries that share a GPU among pods (HAMi, MPS) answer requests past the limit as if the GPU were full.
    """
    failure, device = balance.failure, balance.device
    if failure.kind is FailureKind.LIMIT:
        limit = failure.sizes.get("limit_bytes")
        of = f" of {human_bytes(limit)}" if limit else ""
        return Finding(Weight.CERTAIN, f"The process reached its limit{of} of GPU memory")
    if device is None or device.allowed_bytes is None or balance.share(device.allowed_bytes) >= _BELOW_THE_GPU:
        return None
    known = (device.reserved_bytes, device.allocated_bytes, device.process_bytes)
    held = next((size for size in known if size is not None), None)
    if held is None or held + device.requested_bytes < _AT_THE_LIMIT * device.allowed_bytes:
        return None
    had_room = device.free_bytes is not None and device.free_bytes >= device.requested_bytes
    much_below = balance.share(device.allowed_bytes) < _TABLE_FULL
    return Finding(
        Weight.CERTAIN if had_room and much_below else Weight.LIKELY,
        f"The process may use {human_bytes(device.allowed_bytes)} of the GPU's {human_bytes(balance.total_bytes)}, "
        f"held {human_bytes(held)} and asked for {human_bytes(device.requested_bytes)}"
        + (f", although {human_bytes(device.free_bytes or 0)} of the GPU were free" if had_room else ""),
        balance.total_bytes - device.allowed_bytes,
    )
