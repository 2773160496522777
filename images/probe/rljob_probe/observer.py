"""Observers of GPU out-of-memory errors: of torch, with the numbers just before it raises, and of the start of vLLM."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from rljob_probe import circumstances, notes, samples
from rljob_probe.account import account_of_request, places_of_frames
from rljob_probe.import_hooks import after_import


def observe(torch: ModuleType) -> None:
    """Attach the observer when the program first uses CUDA; attaching it earlier would initialize CUDA.

    Does nothing if torch does not support observers (builds for the CPU), or its allocator does not.
    """
    attach = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
    when_cuda_is_used = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
    if attach is None or when_cuda_is_used is None:
        return

    def on_out_of_memory(device: int, requested: int, allowed: int, free: int) -> None:
        try:
            caller = sys._getframe().f_back  # None in torch's thread for the backward pass
            failure = account_of_request(places_of_frames(caller), torch, device, requested, allowed, free)
            notes.save(_evidence(failure, list(circumstances.sources_of_frames(caller)), torch))
        except Exception:
            pass  # torch is about to raise its own error

    def attach_observer() -> None:
        try:
            attach(on_out_of_memory)
            samples.watch(torch)
        except Exception:
            pass

    when_cuda_is_used(attach_observer)


def _evidence(failure: dict[str, Any], sources: list[str], torch: Any) -> dict[str, Any]:
    """`rljob_api.step_report.Evidence`, with its JSON names. `failure`: the account of the request."""
    place, phase, device = circumstances.place(), circumstances.phase_of(sources), failure["device"]
    stats = torch.cuda.memory_stats(device["gpu"])
    memory = {
        "role": place["role"],
        "rank": place["rank"],
        "allocatedBytes": device["allocatedBytes"],
        "reservedBytes": device["allocatedBytes"] + device["cachedBytes"],
        "peakAllocatedBytes": stats.get("allocated_bytes.all.peak", 0),
        "peakReservedBytes": stats.get("reserved_bytes.all.peak", 0),
        "deviceFreeBytes": device["freeBytes"],
        "deviceTotalBytes": device["totalBytes"],
        "peakRssBytes": circumstances.peak_rss_bytes(),
    }
    message = "CUDA out of memory: {} requested, {} of {} free".format(
        *(_size(device[name]) for name in ("requestedBytes", "freeBytes", "totalBytes"))
    )
    return {
        "time": circumstances.timestamp(),
        **place,
        "step": circumstances.current_step(),
        **({"phase": phase} if phase else {}),
        "message": message,
        "memory": memory,
        "failure": failure,
    }


def _size(size_bytes: int) -> str:
    """Size in the format of torch: 2.00 GiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} bytes"


# Notes of vLLM engines that lack the memory to start: their process logs the error, and its parent gets another.


CHECKS = {
    "vllm.v1.worker.utils": "request_memory",
    "vllm.v1.core.kv_cache_utils": "_check_enough_kv_cache_memory",
}
"""Functions that raise the errors, by module."""


def watch_engine_start() -> None:
    """Watch the checks as soon as vLLM is imported. A version without one of them is not watched."""
    for module in CHECKS:
        after_import(module, _watch)


def _watch(module: ModuleType) -> None:
    name = CHECKS[module.__name__]
    check = getattr(module, name, None)
    if check is None:
        return
    refused = False

    @functools.wraps(check)
    def watched(*given: Any, **named: Any) -> Any:
        nonlocal refused
        try:
            found = check(*given, **named)
        except Exception as error:
            refused = _save_note(error)
            raise
        if refused:  # the program has tried again with other settings
            refused = False
            _discard_note()
        return found

    setattr(module, name, watched)


def _save_note(error: Exception) -> bool:
    """True if the error has a note."""
    try:
        from rljob_probe.explanation import save_note

        return save_note(error, sys._getframe(2), sys.modules.get("torch"))
    except Exception:
        return False  # vLLM's own error is on its way


def _discard_note() -> None:
    try:
        notes.discard()
    except OSError:
        pass
