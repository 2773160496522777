"""Membership of a rank in the process group of all policy ranks, which it can leave after a failure and join again.

A rank that fails in a collective operation leaves the others waiting. It therefore leaves the group, which interrupts
them: NCCL's communicators are aborted on every rank, on a thread that waits for this; gloo cannot be aborted, but the
connections that a rank closes when it leaves fail the operations of its peers, which then leave as well.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

_LEFT = "left"
"""Key that the first rank to leave sets in the store of its generation."""

_NO_TIMEOUT = timedelta(days=365)


class Membership:
    """Membership of one rank. Each `join` is a generation, with a store on a separate port."""

    def __init__(self, rank: int, world_size: int, device: Literal["cpu", "cuda"]) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._served: TCPStore | HashStore | None = None
        self._generation: _Generation | None = None
        self.before_leaving: Callable[[], None] = lambda: None
        """Drops all references to process groups: gloo's connections close with the last of them."""

    def rendezvous(self) -> tuple[str, int]:
        """Serve a store for `join` on a port that the system chooses. Returns host and port.

        Called on rank 0 before all ranks join. A single rank opens no port.
        """
        if self._world_size == 1:
            self._served = HashStore()
            return "", 0
        from ray.util import get_node_ip_address

        host = get_node_ip_address()
        self._served = store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, store.port

    def join(self, host: str, port: int) -> None:
        """Join the group of all ranks. Returns when all have joined."""
        store = self._served or TCPStore(host, port, is_master=False)
        dist.init_process_group(
            "gloo" if self._device == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=self._rank,
            world_size=self._world_size,
            device_id=torch.device("cuda", torch.cuda.current_device()) if self._device == "cuda" else None,
        )
        watched = TCPStore(host, port, is_master=False) if self._world_size > 1 else None
        self._generation = _Generation(store, watched, self._device)

    def leave(self) -> None:
        """Leave the group and interrupt the other ranks. Does nothing if this rank has left."""
        generation, self._generation = self._generation, None
        if generation is not None:
            self.before_leaving()
            generation.end()

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Run work that waits for other ranks: after an error, leave the group. A single rank has no group.

        Raises `RuntimeError` if another rank has left in the meantime: on a GPU, results may then be incomplete.
        """
        try:
            yield
            if self._generation is not None and self._generation.interrupted:
                raise RuntimeError("another rank of the policy has failed and left the process group")
        except BaseException as error:
            if self._world_size > 1:
                forget_locals(error)
                self.leave()
            raise


class _Generation:
    """One process group, from its creation to its end."""

    def __init__(self, store: TCPStore | HashStore, watched: TCPStore | None, device: Literal["cpu", "cuda"]) -> None:
        """`watched`: another connection to the store, since one that waits serves nothing else; None for one rank."""
        self._store = store
        self._device = device
        self._lock = threading.Lock()
        self._ended = False
        self.interrupted = False
        """True once any rank has left."""
        if watched is not None:
            threading.Thread(target=self._watch, args=(watched,), name="membership", daemon=True).start()

    def end(self) -> None:
        with suppress(dist.DistError):  # rank 0, which serves the store, may be gone
            self._store.set(_LEFT, "")
        self._end()

    def _watch(self, store: TCPStore) -> None:
        try:
            store.wait([_LEFT], _NO_TIMEOUT)
        except dist.DistError:  # the store has ended
            return
        self.interrupted = True
        if self._device == "cuda":
            self._end()

    def _end(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            if self._device == "cuda":
                # All groups in one call: aborted one by one, they can deadlock (pytorch 119797).
                dist.distributed_c10d._abort_process_group(None)
            else:
                dist.destroy_process_group()


def forget_locals(error: BaseException | None) -> None:
    """Drop what the ended frames of an error hold: process groups, and the tensors of the failed pass."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
