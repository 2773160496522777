"""Rules for a GPU that the process does not have to itself: other processes, contexts, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.diagnosis.ledger import ORDINARY_CACHE_SHARE, Ledger
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import DeviceMemory, Failure, FailureKind, GpuProcess
from rljob_memory.sizes import GIB, MIB, human_bytes

# A foreign process holds GPU memory: memory that is neither free nor the failing process's own.
#
# The numbers do not identify the process: NVML's pids are the host's, and inside a pod the other process may be the
# job's own engine or policy. If the log shows a vLLM engine next to a trainer, that is equally likely.

_MOST = 0.5
_MUCH = 0.2
_FULL = 0.9
_OF_RANKS = 0.4
_BESIDE_A_CACHE = 0.35
_LARGE_PROCESS_BYTES = 4 * GIB
_MUCH_AT_START = 0.1
"""Share of the device: more than the driver and the engine's own context take before it starts."""


def foreign_process(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    match failure.kind:
        case FailureKind.ALLOCATOR:
            return _beside_torch(failure, evidence, ledger)
        case FailureKind.ENGINE_START:
            return _before_the_engine(failure, evidence, ledger)
        case FailureKind.DRIVER | FailureKind.MATH_LIBRARY:
            return _in_the_table(failure, evidence)
        case FailureKind.ENGINE_UNBALANCED:
            return Diagnosis(
                FailureClass.FOREIGN_PROCESS,
                0.7,
                "Before the engine loaded anything, one of its GPUs had much less free memory than the others",
            )
        case FailureKind.ENGINE_PROFILING:
            return Diagnosis(
                FailureClass.FOREIGN_PROCESS,
                0.7,
                "Another process released GPU memory while the engine was measuring how much it needs",
            )
        case FailureKind.ENGINE_SLEEP:
            return Diagnosis(
                FailureClass.FOREIGN_PROCESS,
                0.45,
                "Another process took GPU memory while the engine was going to sleep",
            )
        case _:
            return None


def _in_the_table(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    """A message without numbers, and a table in which a GPU is full: it may also show the failing process itself."""
    if failure.activity or failure.in_engine or evidence.shows_a_trainer:
        return None
    if not evidence.gpu_use:
        return _beside_its_own_context(evidence)
    used, total = max(evidence.gpu_use, key=lambda gpu: gpu[0] / gpu[1])
    if used < _FULL * total:
        return None
    return Diagnosis(
        FailureClass.FOREIGN_PROCESS,
        0.5,
        f"The log shows a GPU with {human_bytes(used)} of {human_bytes(total)} in use",
    )


def _beside_its_own_context(evidence: CollectedEvidence) -> Diagnosis | None:
    """A list of processes in which one has much of a GPU, and another one no more than its context."""
    for gpu, processes in evidence.gpu_processes.items():
        sizes = sorted(process.used_bytes for process in processes)
        if len(sizes) > 1 and sizes[-1] >= _LARGE_PROCESS_BYTES and sizes[0] <= _LARGEST_CONTEXT_BYTES:
            return Diagnosis(
                FailureClass.FOREIGN_PROCESS,
                0.4,
                f"A process holds {human_bytes(sizes[-1])} of GPU {gpu}, beside one with {human_bytes(sizes[0])}",
            )
    return None


def _beside_torch(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if evidence.siblings:
        return None  # Other processes of the job use GPUs: they are no strangers.
    policy = ledger.policy_beside_the_engine_bytes
    engine = 0 if ledger.engine_is_in_the_process else ledger.engine_bytes
    device, foreign = failure.device, ledger.foreign_bytes(known_bytes=policy + engine)
    if device is None or not device.total_bytes or not foreign:
        return None
    contexts = sum(process.used_bytes for process in context_sized(device))
    if foreign - contexts < contexts:
        return None
    share = foreign / device.total_bytes
    confidence = 0.8 if share >= _MOST else 0.7 if share >= _MUCH else 0.5
    by_an_engine = not evidence.engines_apart and (evidence.engine.seen or failure.role is not None)
    if _started_together(device):
        confidence = min(confidence, _OF_RANKS)
    if share < _MUCH and _has_a_cache_instead(device):
        confidence = min(confidence, _BESIDE_A_CACHE)
    if failure.in_engine and not evidence.shows_a_trainer and evidence.plan is None:
        by_an_engine = False  # It is the engine, and nothing shows a trainer beside it.
    if evidence.siblings is not None:
        by_an_engine = False  # The process knows that no other process of its container uses a GPU.
    if by_an_engine and not (ledger.engine_holds_little and foreign > ledger.sleeping_engine_bytes):
        confidence /= 2
    beside = f", besides {human_bytes(policy)} of the policy" if policy else ""
    return Diagnosis(
        FailureClass.FOREIGN_PROCESS,
        round(confidence, 2),
        f"{human_bytes(foreign)} of the GPU's {human_bytes(device.total_bytes)} were held by other processes"
        f"{beside}; {human_bytes(device.requested_bytes)} more did not fit",
        {"other_processes_bytes": foreign},
    )


def _has_a_cache_instead(device: DeviceMemory) -> bool:
    """True if the message lists no other process, and torch's cache in its own has enough memory for the request."""
    lists_none = device.process_bytes is not None and not device.others
    ordinary_bytes = round(ORDINARY_CACHE_SHARE * (device.reserved_bytes or 0))
    return lists_none and device.own_cache_bytes >= max(device.requested_bytes, ordinary_bytes)


def _before_the_engine(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if evidence.shows_a_trainer or evidence.siblings:
        return None  # its own model is what fills the card before its engine starts
    sizes = failure.sizes
    free, total = sizes.get("free_bytes"), sizes.get("total_bytes")
    if not total or free is None or total - free - ledger.policy_reserved_bytes < _MUCH_AT_START * total:
        return None
    return Diagnosis(
        FailureClass.FOREIGN_PROCESS,
        0.65,
        f"Before the engine started, {human_bytes(total - free)} of the GPU's {human_bytes(total)} were in use",
        {"other_processes_bytes": total - free},
    )


# Processes that only touched the GPU each hold a CUDA context on it.
#
# A context with torch's kernels takes 250–900 MiB (pytorch issues 20532 and 49481; 719 MiB after a first product on an
# H200), 1.2 GiB with a communicator of NCCL (returnn issue 1469). Most of them are on GPU 0, the default device.

_SMALLEST_CONTEXT_BYTES = 200 * MIB
_LARGEST_CONTEXT_BYTES = 1280 * MIB
_SMALL_SHARE = 0.05
"""Share of the GPU below which contexts do not explain that a larger request than they are found no room."""
_ONE_SHARE = 0.02
"""Share of the GPU below which a single context, smaller than the request, explains nothing: monitors have one too."""
_MANY = 2
_MANY_ALONE = 3
_MUCH_CONTEXTS, _MOST_CONTEXTS = 0.1, 0.4
"""Shares of the GPU that other ranks hold."""
_CONTEXTS_OF_RANKS, _MOST_OF_RANKS = 0.5, 0.65
_STARTED_TOGETHER = 0.7
_EQUAL = 1.02
"""Without a failure, contexts count if there are several, of processes that did the same."""
_ALIKE = 1.25
"""Most factor between contexts of one program. Other sizes are those of other programs, which a desktop has too."""


def context_sized(device: DeviceMemory) -> list[GpuProcess]:
    """Other processes on the device that hold about as much as a context."""
    return [process for process in device.others if _is_context(process)]


def _started_together(device: DeviceMemory) -> bool:
    """True if the process IDs of the others follow each other, as those of ranks that one launcher has started.

    One of them works on the GPU; the failing process and the rest are on it with little more than their contexts. One
    ID may be missing: that of the failing process, which its message does not print.
    """
    ids = sorted(process.pid for process in device.others)
    contexts = len(context_sized(device))
    if contexts < _MANY or contexts != len(ids) - 1 or not 0 < (device.process_bytes or 0) <= _LARGEST_CONTEXT_BYTES:
        return False
    return ids[-1] - ids[0] <= len(ids)


def controller_context(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    device = failure.device
    if ranks := _of_ranks(ledger):
        return ranks
    if device is not None and device.others:
        return _of_message(ledger, device)
    if failure.kind in (FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL):
        return _of_process_table(evidence)
    return None


def _of_ranks(ledger: Ledger) -> Diagnosis | None:
    """Other ranks of the job hold much of the GPU: each of them has one of its own. No engine is among them."""
    foreign = ledger.foreign_bytes()
    if not ledger.has_only_ranks_beside or ledger.share(foreign) < _MUCH_CONTEXTS or ledger.failure.in_engine:
        return None
    names = ", ".join(ledger.evidence.siblings or ())
    return Diagnosis(
        FailureClass.CONTROLLER_CONTEXT,
        _MOST_OF_RANKS if ledger.share(foreign) >= _MOST_CONTEXTS else _CONTEXTS_OF_RANKS,
        f"{human_bytes(foreign)} of the GPU belonged to other processes of the same job ({names}), none of them an "
        "engine: each rank should work on a GPU of its own",
        {"other_processes_bytes": foreign},
    )


def _of_message(ledger: Ledger, device: DeviceMemory) -> Diagnosis | None:
    contexts = context_sized(device)
    held = sum(process.used_bytes for process in contexts)
    the_sleeping_engine = ledger.engine_holds_little and len(contexts) == 1
    if not contexts or the_sleeping_engine:
        return None
    suffices = (device.free_bytes or 0) + held >= device.requested_bytes
    is_small = held < device.requested_bytes and held < _SMALL_SHARE * (device.total_bytes or 0)
    if is_small and len(contexts) == 1 and ledger.share(held) < _ONE_SHARE:
        return None
    others = sum(process.used_bytes for process in device.others) - held
    if _started_together(device):
        found = _diagnosis(_STARTED_TOGETHER, device.gpu or 0, len(contexts), held)
        ranks = "beside a rank that works on it: their process IDs follow each other, as those of one launcher do"
        return replace(found, message=f"{found.message}, {ranks}")
    if not suffices or others > held or is_small:
        confidence = 0.3
    else:
        confidence = 0.75 if _are_of_one_program(contexts) or ledger.evidence.barrier_on_gpu_0 else 0.4
    return _diagnosis(confidence, device.gpu or 0, len(contexts), held)


def _of_process_table(evidence: CollectedEvidence) -> Diagnosis | None:
    processes = evidence.gpu_processes.get(0, ())
    contexts = [process for process in processes if _is_context(process)]
    if len(contexts) < _MANY or len(contexts) == len(processes):
        return None
    return _diagnosis(0.65, 0, len(contexts), sum(process.used_bytes for process in contexts))


def contexts_alone(evidence: CollectedEvidence) -> Diagnosis | None:
    """Equal contexts beside the process that works on a GPU, in a table of processes without a failure."""
    for gpu, processes in evidence.gpu_processes.items():
        contexts = [process.used_bytes for process in processes if _is_context(process)]
        largest = max((process.used_bytes for process in processes), default=0)
        if len(contexts) < _MANY_ALONE or max(contexts) > _EQUAL * min(contexts) or largest <= max(contexts):
            continue
        found = _diagnosis(0.5, gpu, len(contexts), sum(contexts))
        return replace(found, message=f"The log shows no failure, but {found.message[0].lower()}{found.message[1:]}.")
    return None


def _diagnosis(confidence: float, gpu: int, count: int, held: int) -> Diagnosis:
    processes = "Another process holds" if count == 1 else f"{count} other processes hold"
    return Diagnosis(
        FailureClass.CONTROLLER_CONTEXT,
        confidence,
        f"{processes} {human_bytes(held)} on GPU {gpu}, about the size of a bare CUDA context each",
        {"context_processes": count, "contexts_bytes": held},
    )


def _are_of_one_program(contexts: Sequence[GpuProcess]) -> bool:
    """True if at least two processes hold about the same."""
    sizes = sorted(process.used_bytes for process in contexts)
    return any(larger <= _ALIKE * smaller for smaller, larger in pairwise(sizes))


def _is_context(process: GpuProcess) -> bool:
    return _SMALLEST_CONTEXT_BYTES <= process.used_bytes <= _LARGEST_CONTEXT_BYTES


# The process has a limit below the GPU's memory: a fraction set in torch, or a share of the GPU set from outside.
#
# torch's message names the limit (`1.50 GiB allowed`), and raises although the driver has memory left. Libraries that
# share a GPU among pods (HAMi, MPS) answer requests past the limit as if the GPU were full.

_BELOW_THE_GPU = 0.99
"""A limit of nearly all memory is none: torch names it even if the fraction is 1."""
_AT_THE_LIMIT = 0.98
_MOST_OF_THE_GPU = 0.9
"""A limit above this share leaves little to gain."""


def gpu_memory_limit(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if failure.kind is FailureKind.LIMIT:
        limit = failure.sizes.get("limit_bytes")
        of = f" of {human_bytes(limit)}" if limit else ""
        return Diagnosis(FailureClass.GPU_MEMORY_LIMIT, 0.9, f"The process reached its limit{of} of GPU memory")
    device = failure.device
    if device is None or device.allowed_bytes is None:
        return None
    if device.total_bytes and device.allowed_bytes >= _BELOW_THE_GPU * device.total_bytes:
        return None
    known = (device.reserved_bytes, device.allocated_bytes, device.process_bytes)
    held = next((nbytes for nbytes in known if nbytes is not None), None)
    if held is None or held + device.requested_bytes < _AT_THE_LIMIT * device.allowed_bytes:
        return None
    had_room = device.free_bytes is not None and device.free_bytes >= device.requested_bytes
    return Diagnosis(
        FailureClass.GPU_MEMORY_LIMIT,
        0.9 if had_room and device.allowed_bytes < _MOST_OF_THE_GPU * (device.total_bytes or 0) else 0.6,
        f"The process may use {human_bytes(device.allowed_bytes)} of the GPU's "
        f"{human_bytes(device.total_bytes or 0)}, held {human_bytes(held)} and asked for "
        f"{human_bytes(device.requested_bytes)}"
        + (f", although {human_bytes(device.free_bytes or 0)} of the GPU were free" if had_room else ""),
    )
