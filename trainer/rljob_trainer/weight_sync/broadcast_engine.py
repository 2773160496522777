"""Backend for disaggregated roles, the engine's side. Imported only by vLLM's factory, since it imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from rljob_trainer.weight_sync.broadcast_group import BroadcastGroup, BroadcastInterrupted, checksum, joined_store
from rljob_trainer.weight_sync.layerwise_engine import BucketLayout, LayerwiseEngine


@dataclass
class BroadcastInitInfo(WeightTransferInitInfo):
    """The group to join."""

    host: str
    port: int
    """Of the policy's store."""
    rank: int
    """Of this engine; that of the policy is 0."""
    size: int


@dataclass
class BroadcastUpdateInfo(BucketLayout):
    """One bucket of weights, which the policy broadcasts next."""

    checksum: int
    """Of the bytes that are sent: NCCL would not report a library that it could not load."""


class BroadcastWeightTransferEngine(LayerwiseEngine[BroadcastInitInfo, BroadcastUpdateInfo]):
    """Loads weights that the policy broadcasts."""

    init_info_cls = BroadcastInitInfo
    update_info_cls = BroadcastUpdateInfo
    _group: BroadcastGroup | None = None

    def init_transfer_engine(self, init_info: BroadcastInitInfo) -> None:
        self.shutdown()
        store = joined_store(init_info.host, init_info.port)
        on_gpu = self.device.type == "cuda"
        self._group = BroadcastGroup(store, init_info.rank, init_info.size, "cuda" if on_gpu else "cpu")

    def receive_weights(self, update_info: BroadcastUpdateInfo) -> None:
        if self._group is None:
            raise BroadcastInterrupted("expected a group with the policy, found none: join_policy comes first")
        buffer = torch.empty(sum(update_info.tensor_sizes), dtype=torch.uint8, device=self.device)
        self._group.broadcast(buffer, watch=self._group.require_sender)
        if (found := checksum(buffer)) != update_info.checksum:
            raise BroadcastInterrupted(
                f"expected weights with the checksum {update_info.checksum}, received some with {found}"
            )
        self.model.load_weights(update_info.unpacked(buffer))

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None
