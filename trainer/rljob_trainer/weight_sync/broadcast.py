"""Weight sync from a policy to engines on other GPUs or machines, by broadcast: gloo on CPUs, NCCL on GPUs.

The group of the policy's first rank and the engines is apart from the policy's own group and from those of vLLM, so
that either side can be replaced. A collective that waits for a lost process never ends by itself with NCCL: each side
therefore watches the other while it waits, and leaves the group if the other has failed.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from rljob_client.errors import RunError
from rljob_trainer.weight_sync.transfer import EngineCalls, buckets, layout, packed

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_LOST_ENGINE_SECONDS = 15.0
"""The connections of a lost engine close at once. Ray reports the loss a little later."""


class WeightBroadcaster:
    """Broadcasts weights to engines, through a group that is kept from sync to sync.

    A failed sync leaves the group. The next one makes a new group with the engines that it is given.
    """

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self._device = device
        self._group: BroadcastGroup | None = None
        self._members: list[Any] = []

    def send(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        engines: Sequence[Any],
        version: int,
        bucket_bytes: int,
    ) -> None:
        """Send every parameter to every engine. Afterwards the engines generate with weights `version`.

        `named_parameters`: checkpoint names, and tensors of full shape. `engines`: Ray actor handles of
        `DisaggregatedEngine`; empty on all ranks but the first, which only take part in gathering the parameters.
        `bucket_bytes`: approximate size of the weights that are sent at once. If it raises, the engines do not generate
        until a later call completes.
        """
        if not engines:
            for _ in named_parameters:
                pass
            return
        calls = EngineCalls(engines)
        try:
            group = self._group_with(engines, calls)
            calls.begin("start_weight_update")
            calls.wait()  # an engine that fails here would never join the broadcast
            for bucket in buckets(named_parameters, bucket_bytes):
                # Packed and summed on the stream that gathers parameters: a collective of the policy's own group is
                # over before this one begins, which has other members.
                buffer = packed(bucket)
                # One bucket is packed while the engines load the previous one.
                calls.wait(until_left=1)
                calls.begin("update_weights", {**layout(bucket), "checksum": checksum(buffer)})
                group.broadcast(buffer, watch=calls.raise_failure)
                del buffer
            calls.begin("finish_weight_update", version)
            calls.wait()
        except BaseException as error:
            self.leave()
            if isinstance(error, BroadcastInterrupted):
                calls.raise_failure(within_seconds=_LOST_ENGINE_SECONDS)
            raise

    def leave(self) -> None:
        """Leave the group. Engines that wait for weights fail at once."""
        if self._group is not None:
            self._group.leave()
        self._group, self._members = None, []

    def _group_with(self, engines: Sequence[Any], calls: EngineCalls) -> BroadcastGroup:
        """The group with exactly these engines: a restarted one is not in the group of its predecessor."""
        if self._group is not None and self._members == list(engines):
            return self._group
        self.leave()
        from ray.util import get_node_ip_address

        store = served_store(get_node_ip_address())
        size = 1 + len(engines)
        calls.begin_each("join_policy", [(store.host, store.port, rank, size) for rank in range(1, size)])
        try:
            group = BroadcastGroup(store, 0, size, self._device)
        except RuntimeError as error:
            raise BroadcastInterrupted(f"the engines did not join the policy's group: {error}") from error
        calls.wait()
        self._group, self._members = group, list(engines)
        return group


_JOIN_SECONDS = 120.0
"""Time for all members to join."""
_LONGEST_SECONDS = 3600.0
"""Limit of a broadcast. The deadline of the phase is earlier, unless it is disabled."""
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
        """Send `tensor`, of any shape, or receive into it. Returns when its memory may be used again.

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
        """Raise `BroadcastInterrupted` in a receiver if the sender has died or left the group."""
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
    """Sum of the bytes as 32-bit words, and of the remaining bytes. `buffer`: uint8, [bytes]."""
    import torch

    whole = buffer.numel() // 4 * 4
    words, rest = buffer[:whole].view(torch.int32), buffer[whole:]
    return int(words.sum(dtype=torch.int64)) + int(rest.sum(dtype=torch.int64))
