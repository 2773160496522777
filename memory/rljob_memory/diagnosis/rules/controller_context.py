"""Processes that only touched the GPU each hold a CUDA context on it.

A context with torch's kernels takes 250–900 MiB (pytorch issues 20532 and 49481; 719 MiB after a first product on an
H200), 1.2 GiB with a communicator of NCCL (returnn issue 1469). Most of them are on GPU 0, the default device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import DeviceMemory, Failure, FailureKind, GpuProcess
from rljob_memory.sizes import MIB, human_bytes

_SMALLEST_CONTEXT_BYTES = 200 * MIB
LARGEST_CONTEXT_BYTES = 1280 * MIB
_SMALL_SHARE = 0.05
"""Share of the GPU below which contexts do not explain that a larger request than they are found no room."""
_ONE_SHARE = 0.02
"""Share of the GPU below which a single context, smaller than the request, explains nothing: monitors have one too."""
_MANY = 2
_MANY_ALONE = 3
_MUCH, _MOST = 0.1, 0.4
"""Shares of the GPU that other ranks hold."""
_OF_RANKS, _MOST_OF_RANKS = 0.5, 0.65
_STARTED_TOGETHER = 0.7
_EQUAL = 1.02
"""Without a failure, contexts count if there are several, of processes that did the same."""
_ALIKE = 1.25
"""Most factor between contexts of one program. Other sizes are those of other programs, which a desktop has too."""


def context_sized(device: DeviceMemory) -> list[GpuProcess]:
    """Other processes on the device that hold about as much as a context."""
    return [process for process in device.others if _is_context(process)]


def started_together(device: DeviceMemory) -> bool:
    """True if the process IDs of the others follow each other, as those of ranks that one launcher has started.

    One of them works on the GPU; the failing process and the rest are on it with little more than their contexts. One
    ID may be missing: that of the failing process, which its message does not print.
    """
    ids = sorted(process.pid for process in device.others)
    contexts = len(context_sized(device))
    if contexts < _MANY or contexts != len(ids) - 1 or not 0 < (device.process_bytes or 0) <= LARGEST_CONTEXT_BYTES:
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
    if not ledger.has_only_ranks_beside or ledger.share(foreign) < _MUCH or ledger.failure.in_engine:
        return None
    names = ", ".join(ledger.evidence.siblings or ())
    return Diagnosis(
        FailureClass.CONTROLLER_CONTEXT,
        _MOST_OF_RANKS if ledger.share(foreign) >= _MOST else _OF_RANKS,
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
    if started_together(device):
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
    return _SMALLEST_CONTEXT_BYTES <= process.used_bytes <= LARGEST_CONTEXT_BYTES
