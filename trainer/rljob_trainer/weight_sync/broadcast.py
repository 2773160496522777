"""The policy's side of a weight sync to engines on other GPUs or machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rljob_trainer.own_address import own_address
from rljob_trainer.weight_sync.broadcast_group import BroadcastGroup, BroadcastInterrupted, checksum, served_store
from rljob_trainer.weight_sync.transfer import EngineCalls, buckets, layout, packed

if TYPE_CHECKING:
    import torch


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

        `named_parameters`: checkpoint names and full tensors. `engines`: Ray actor handles of `DisaggregatedEngine`;
        empty on all ranks but the first, which only take part in gathering the parameters. `bucket_bytes`: approximate
        size of the weights that are sent at once.
        If it raises, the engines do not generate until a later call completes.
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
        store = served_store(own_address())
        size = 1 + len(engines)
        calls.begin_each("join_policy", [(store.host, store.port, rank, size) for rank in range(1, size)])
        try:
            group = BroadcastGroup(store, 0, size, self._device)
        except RuntimeError as error:
            raise BroadcastInterrupted(f"the engines did not join the policy's group: {error}") from error
        calls.wait()
        self._group, self._members = group, list(engines)
        return group
