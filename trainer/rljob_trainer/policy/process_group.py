"""The process group of the policy ranks, and the store through which they connect."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from rljob_trainer.own_address import own_address


class Rendezvous:
    """A key-value store for all ranks.

    Rank 0 serves it on a port that the system chooses, which avoids races. A single rank needs no port.
    """

    def __init__(self, world_size: int) -> None:
        self._alone = world_size == 1
        self._served: TCPStore | HashStore | None = None

    def serve(self) -> tuple[str, int]:
        """Start the store. Returns host and port for the other ranks."""
        if self._alone:
            self._served = HashStore()
            return "", 0
        host = own_address()
        self._served = store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, store.port

    def join(self, host: str, port: int) -> TCPStore | HashStore:
        """The store, connected to that of rank 0."""
        return TCPStore(host, port, is_master=False) if self._served is None else self._served


def init_process_group(store: TCPStore | HashStore, rank: int, world_size: int, device: Literal["cpu", "cuda"]) -> None:
    """The default group: gloo for tensors on the CPU, NCCL for those on the GPU."""
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None,
    )
