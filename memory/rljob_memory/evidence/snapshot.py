"""Reads torch's allocator snapshots (`torch.cuda.memory._dump_snapshot`) without torch and without trusting them.

A snapshot is a pickle, and a pickle can run any code. Only plain containers are accepted, and a separate process with
limited memory reads it, since a few bytes of a pickle can also request any amount of memory.
"""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rljob_api.memory_failure import DeviceMemory
from rljob_memory.sizes import human_bytes

PICKLE_START = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of a pickle of protocol 2 to 5."""

_MEMORY_LIMIT_BYTES = 8 << 30
_TIME_LIMIT_SECONDS = 300


class UnreadableSnapshot(Exception):
    """The message has what was expected and what was found."""


def read_snapshot(path: Path) -> list[DeviceMemory]:
    """Memory at each failed request in the snapshot's history, in order; empty if none failed.

    Raises `UnreadableSnapshot` if the file is not a snapshot, or needs more than 8 GiB or 5 minutes to read.
    """
    command = [sys.executable, "-m", "rljob_memory.evidence.snapshot", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIME_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UnreadableSnapshot(f"{path}: reading it took more than {_TIME_LIMIT_SECONDS} s; is it damaged?") from None
    if done.returncode != 0:
        errors = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = (
            errors[-1] if errors else f"reading it needs more than {human_bytes(_MEMORY_LIMIT_BYTES)}, or it is damaged"
        )
        raise UnreadableSnapshot(
            f"{path}: expected a snapshot of torch.cuda.memory._dump_snapshot or text, found another pickle: {reason}"
        )
    return [DeviceMemory(**numbers) for numbers in json.loads(done.stdout)]


def failed_requests(snapshot: Mapping[str, Any]) -> list[DeviceMemory]:
    """Memory at each failed request of a snapshot, without values that it lacks or has in another shape."""
    segments = [segment for segment in _list(snapshot.get("segments")) if isinstance(segment, Mapping)]
    found = []
    for device, trace in enumerate(_list(snapshot.get("device_traces"))):
        for event in _list(trace):
            if isinstance(event, Mapping) and event.get("action") == "oom":
                found.append(_device_memory(device, event, [s for s in segments if s.get("device", 0) == device]))
    return found


def _device_memory(device: int, event: Mapping[str, Any], segments: list[Mapping[str, Any]]) -> DeviceMemory:
    reserved = sum(_count(segment.get("total_size")) for segment in segments)
    allocated = sum(_count(segment.get("allocated_size")) for segment in segments)
    blocks = (block for segment in segments for block in _list(segment.get("blocks")) if isinstance(block, Mapping))
    free_blocks = [_count(block.get("size")) for block in blocks if block.get("state") == "inactive"]
    free = event.get("device_free")
    return DeviceMemory(
        requested_bytes=_count(event.get("size")),
        gpu=device,
        # In an oom event the address field holds the device's free memory; later versions name it.
        free_bytes=_count(free if free is not None else event.get("addr")) or None,
        allocated_bytes=allocated,
        cached_bytes=max(reserved - allocated, 0),
        largest_cached_block_bytes=max(free_blocks, default=None),
    )


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 50 else 0


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles dicts, lists, tuples, sets, texts and numbers, which need no name to be looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot holds only plain values")


def _main(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    try:
        with open(path, "rb") as file:
            snapshot = _PlainUnpickler(file).load()
    except Exception as error:  # A damaged pickle can raise any exception.
        sys.exit(f"{type(error).__name__}: {error}"[:300])
    if not isinstance(snapshot, dict) or "segments" not in snapshot:
        sys.exit("it holds no list of segments")
    found = failed_requests(snapshot)
    print(json.dumps([memory.model_dump(exclude_unset=True) for memory in found]))


if __name__ == "__main__":
    _main(sys.argv[1])
