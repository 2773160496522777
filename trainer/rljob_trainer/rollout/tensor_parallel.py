"""Processes of one engine that divide its weights among them (tensor parallelism).

Each is an actor of its own with a GPU of its own, as in vLLM's `external_launcher`: it has a scheduler, gets the same
requests, and samples the same tokens from the same logits. vLLM therefore starts no processes, which would outlive an
actor that is killed, and every failure, memory sample and sleep is that of a process which Ray knows. An engine never
spans machines.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST = "127.0.0.1"
"""All processes of an engine are in one pod."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One process of an engine."""

    index: int

    size: int
    """Processes of the engine."""

    @classmethod
    def of(cls, rank: int, size: int) -> Shard:
        """`rank`: among the processes of all engines, which are numbered engine by engine."""
        return cls(rank % size, size)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def has_peers(self) -> bool:
        return self.size > 1


class EngineStore:
    """A key-value store, in the first process of an engine, through which the others connect.

    The system chooses its port. torch's process group uses the store of its own process at this port (`multi_tenant`),
    so that no other program can take the port in between.
    """

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        self.port: int = self._store.port
