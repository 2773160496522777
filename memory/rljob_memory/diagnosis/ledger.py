"""The ledger of a GPU at the moment of a failure: every byte that the evidence names, with its owner and its source."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_memory.diagnosis.gpu_holders import awake_engine_bytes
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure

_ALLOCATOR = "torch's message"
_DERIVED = "what is left of the total"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A part of the GPU's memory."""

    owner: str
    size_bytes: int
    source: str
    """The evidence that has the number."""
    is_part: bool = False
    """It is a part of the entry before it."""


def ledger_of(failure: Failure, evidence: CollectedEvidence) -> list[LedgerEntry]:
    """The entries of the GPU, which add up to its memory if the message names it; empty without numbers."""
    device = failure.device
    if device is None or device.allocated_bytes is None:
        return []
    engine = awake_engine_bytes(failure, evidence)
    in_process = bool(engine) and device.foreign_bytes < engine
    entries = [LedgerEntry("tensors of the failing process", device.allocated_bytes, _ALLOCATOR)]
    if in_process:
        entries.append(LedgerEntry("the engine's KV cache", engine, "vLLM's log", is_part=True))
    if device.asleep_bytes:
        owner = "an engine that sleeps, whose memory is back with the GPU"
        entries.append(LedgerEntry(owner, device.asleep_bytes, "torch's message and NVML", is_part=True))
    if device.private_pool_bytes:
        entries.append(LedgerEntry("CUDA graphs", device.private_pool_bytes, _ALLOCATOR, is_part=True))
    if device.cached_bytes is not None:
        entries.append(LedgerEntry("torch's cache in it", device.cached_bytes, _ALLOCATOR))
    if device.process_bytes and device.reserved_bytes and (beside := device.process_bytes - device.reserved_bytes) > 0:
        entries.append(LedgerEntry("its CUDA context, NCCL and libraries", beside, "torch's message and NVML"))
    named = sum(process.used_bytes for process in device.others)
    entries.extend(LedgerEntry(f"process {process.pid}", process.used_bytes, "NVML") for process in device.others)
    if device.foreign_bytes > named:
        entries.append(LedgerEntry("other processes, and the driver", device.foreign_bytes - named, _DERIVED))
    if engine and not in_process:
        entries.append(LedgerEntry("the engine's KV cache", engine, "vLLM's log", is_part=True))
    if device.free_bytes is not None:
        entries.append(LedgerEntry("free", device.free_bytes, _ALLOCATOR))
    return entries
