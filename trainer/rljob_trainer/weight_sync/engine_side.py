"""The engine's side of a weight sync, as backends of vLLM. Imported only by vLLM's factory, since it imports vLLM.

The interface of vLLM's weight-transfer engines is the same from 0.26 to 0.32, except for `trainer_send_weights`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rljob_trainer.weight_sync.broadcast import BroadcastGroup, BroadcastInterrupted, checksum, joined_store

InitInfo = TypeVar("InitInfo", bound=WeightTransferInitInfo)
UpdateInfo = TypeVar("UpdateInfo", bound="BucketLayout")


@dataclass
class BucketLayout(WeightTransferUpdateInfo):
    """Weights that are packed end to end. The lists are parallel."""

    names: list[str]
    """Checkpoint names."""

    dtype_names: list[str]

    shapes: list[list[int]]

    tensor_sizes: list[int]
    """Size of each tensor in bytes."""

    def unpacked(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the weights in `buffer` (uint8, one-dimensional), by name, in their shapes and dtypes."""
        parts = buffer.split(self.tensor_sizes)
        for name, dtype, shape, part in zip(self.names, self.dtype_names, self.shapes, parts, strict=True):
            yield name, part.view(getattr(torch, dtype)).view(shape)


class LayerwiseEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads weights in checkpoint format, layer by layer."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_config.tie_word_embeddings:
            # On the CPU the output layer keeps a packed copy of its weight. If the weight is tied to the embedding, the
            # reload receives none for this layer and silently keeps the old copy.
            dispatch_cpu_unquantized_gemm(self.model.lm_head, remove_weight=False)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Required by vLLM 0.26. The policy's process, which does not import vLLM, has a sender of its own."""
        raise NotImplementedError


@dataclass
class ObjectStoreInitInfo(WeightTransferInitInfo):
    """Empty: Ray locates the tensors."""


@dataclass
class ObjectStoreUpdateInfo(BucketLayout):
    """One bucket of weights."""

    buffer: npt.NDArray[np.uint8]
    """The tensors end to end, read-only in shared memory."""


class ObjectStoreWeightTransferEngine(LayerwiseEngine[ObjectStoreInitInfo, ObjectStoreUpdateInfo]):
    """Loads tensors that Ray's object store maps into this process."""

    init_info_cls = ObjectStoreInitInfo
    update_info_cls = ObjectStoreUpdateInfo

    def init_transfer_engine(self, init_info: ObjectStoreInitInfo) -> None:
        pass

    def receive_weights(self, update_info: ObjectStoreUpdateInfo) -> None:
        with warnings.catch_warnings():
            # torch has no read-only tensors; nothing writes to these.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            buffer = torch.from_numpy(update_info.buffer)
        self.model.load_weights(update_info.unpacked(buffer))


@dataclass
class BroadcastInitInfo(WeightTransferInitInfo):
    """The group to join."""

    host: str
    port: int
    """Port of the policy's store."""
    rank: int
    """Rank of this engine; that of the policy is 0."""
    size: int


@dataclass
class BroadcastUpdateInfo(BucketLayout):
    """One bucket of weights, which the policy broadcasts next."""

    checksum: int
    """Checksum of the bytes that are sent: NCCL would not report a library that it could not load."""


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
        """Receive a bucket of weights and load it. Raises `BroadcastInterrupted` without a group, or for other
        bytes."""
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
