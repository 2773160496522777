"""The group in which the policy's first rank broadcasts weights to engines on other GPUs: gloo on CPUs, NCCL on GPUs.

It is apart from the policy's own group and from those of vLLM, so that either side can be replaced. A collective that
waits for a lost process never ends by itself with NCCL: each side therefore watches the other while it waits, and
leaves the group if the other has failed.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from rljob_client.errors import RunError

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_JOIN_SECONDS = 120.0
"""For all members to join."""
_LONGEST_SECONDS = 3600.0
"""For a broadcast. The deadline of the phase is earlier, unless it is disabled."""
_POLL_SECONDS = 0.0005
_WATCH_EVERY_SECONDS = 1.0
_LEFT = "left"

_CLEAN_UP_ONLY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
"""torch's watchdog then aborts a broken communicator without ending the process: the policy survives a lost engine."""


class BroadcastInterrupted(RunError):
    """Another member of the group has failed. What this member has received is incomplete."""


class BroadcastGroup:
    """One member of the group: rank 0 sends, all others receive."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: Literal["cpu", "cuda"]) -> None:
        """Return when all members have joined; with NCCL, they join in the first broadcast.

        `store`: on the machine of rank 0, and new for each group.
        """
        import torch.distributed as dist

        self._store = store
        self._group: Any
        timeout = timedelta(seconds=_LONGEST_SECONDS)
        if device == "cpu":
            store.set_timeout(timedelta(seconds=_JOIN_SECONDS))
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with _environment(**_CLEAN_UP_ONLY):
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def broadcast(self, tensor: torch.Tensor, watch: Callable[[], None]) -> None:
        """Send `tensor`, or receive into it. Returns when its memory may be used again.

        `watch`: called every second; raises if waiting is useless. After any failure the group is unusable.
        """
        work = self._group.broadcast(tensor, 0)
        try:
            watch_at = time.monotonic() + _WATCH_EVERY_SECONDS
            while not work.is_completed():
                if time.monotonic() >= watch_at:
                    watch()
                    watch_at = time.monotonic() + _WATCH_EVERY_SECONDS
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            self._abandon()
            raise BroadcastInterrupted(f"the connection between policy and engines broke: {error}") from error
        except BaseException:
            self._abandon()
            raise

    def require_sender(self) -> None:
        """In a receiver: raise `BroadcastInterrupted` if the sender has died or left the group."""
        try:
            left = self._store.check([_LEFT])
        except RuntimeError as error:
            raise BroadcastInterrupted("the policy died while it sent its weights") from error
        if left:
            raise BroadcastInterrupted("the policy failed while it sent its weights")

    def leave(self) -> None:
        """Leave the group for good: the other members stop waiting."""
        with suppress(RuntimeError):
            self._store.set(_LEFT, "")
        self._abandon()

    def _abandon(self) -> None:
        if self._group is None:
            return
        with suppress(RuntimeError, AttributeError):  # gloo cannot abort
            self._group.abort()
        # gloo's destructor would wait for a pending collective, also when the process exits: it must never run.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables within the block. torch reads them when it creates a group."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def joined_store(host: str, port: int) -> TCPStore:
    """The store that rank 0 serves at `host` and `port`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_JOIN_SECONDS))


def served_store(host: str) -> TCPStore:
    """A new store, on a port that the system chooses."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def checksum(buffer: torch.Tensor) -> int:
    """Sum of the bytes as 32-bit words, and of the bytes that are left. `buffer`: uint8."""
    import torch

    whole = buffer.numel() // 4 * 4
    words, rest = buffer[:whole].view(torch.int32), buffer[whole:]
    return int(words.sum(dtype=torch.int64)) + int(rest.sum(dtype=torch.int64))
