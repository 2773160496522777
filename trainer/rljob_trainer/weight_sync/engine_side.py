"""The engine's side of a weight sync, as backends of vLLM. Imported only by vLLM's factory, since it imports vLLM.

The interface of vLLM's weight-transfer engines is the same from 0.26 to 0.32, except for `trainer_send_weights`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
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
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rljob_client.errors import RunError
from rljob_trainer.weight_sync.broadcast import BroadcastGroup, BroadcastInterrupted, checksum, joined_store
from rljob_trainer.weight_sync.cuda_ipc import OpenedMemory, gpu_of

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
        return self.named(buffer.split(self.tensor_sizes))

    def named(self, parts: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in `parts` (uint8, one-dimensional, one of each weight), as `unpacked` returns them."""
        for name, dtype, shape, part in zip(self.names, self.dtype_names, self.shapes, parts, strict=True):
            yield name, part.view(getattr(torch, dtype)).view(shape)


def is_kept_as_loaded(model: torch.nn.Module) -> bool:
    """True if vLLM computes with the weights as they are in the checkpoint, on a GPU: no layer of `model` quantizes,
    packs or replaces them after they are loaded, so that they can be overwritten."""
    as_loaded = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return all(type(getattr(layer, "quant_method", None)) in as_loaded for layer in model.modules())


class CheckpointEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads weights in checkpoint format: in place if it can, otherwise by vLLM's reload, layer by layer.

    The reload takes vLLM 0.3 ms of Python a weight, more than the copies: it counts the elements of each layer, loads
    them to a new layer, and copies that.
    """

    def start_weight_update(self) -> None:
        if not self._loads_in_place():
            initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        if self._loads_in_place():
            return
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_config.tie_word_embeddings:
            # On the CPU the output layer keeps a packed copy of its weight. If the weight is tied to the embedding, the
            # reload receives none for this layer and silently keeps the old copy.
            dispatch_cpu_unquantized_gemm(self.model.lm_head, remove_weight=False)

    def _loads_in_place(self) -> bool:
        return self.device.type == "cuda" and is_kept_as_loaded(self.model)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Required by vLLM 0.26. The policy's process, which does not import vLLM, has a sender of its own."""
        raise NotImplementedError


@dataclass
class EmptyInitInfo(WeightTransferInitInfo):
    """Each update names the place of its weights."""


@dataclass
class ObjectStoreUpdateInfo(BucketLayout):
    """One bucket of weights."""

    buffer: npt.NDArray[np.uint8]
    """The tensors end to end, read-only in shared memory."""


class ObjectStoreWeightTransferEngine(CheckpointEngine[EmptyInitInfo, ObjectStoreUpdateInfo]):
    """Loads tensors that Ray's object store maps into this process."""

    init_info_cls = EmptyInitInfo
    update_info_cls = ObjectStoreUpdateInfo

    def init_transfer_engine(self, init_info: EmptyInitInfo) -> None:
        pass

    def receive_weights(self, update_info: ObjectStoreUpdateInfo) -> None:
        with warnings.catch_warnings():
            # torch has no read-only tensors; nothing writes to these.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            buffer = torch.from_numpy(update_info.buffer)
        self.model.load_weights(update_info.unpacked(buffer))


@dataclass
class CudaIpcUpdateInfo(BucketLayout):
    """Weights in the memory of the policy rank on the same GPU (`cuda_ipc`)."""

    gpu: str
    handles: list[bytes]
    places: list[tuple[int, int]]

    is_kept: bool
    """The memory stays where it is: it remains open for later syncs."""


class CudaIpcWeightTransferEngine(CheckpointEngine[EmptyInitInfo, CudaIpcUpdateInfo]):
    """Loads weights from the memory of the policy rank on the same GPU."""

    init_info_cls = EmptyInitInfo
    update_info_cls = CudaIpcUpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._memory = OpenedMemory()
        self._kept: set[bytes] = set()

    def init_transfer_engine(self, init_info: EmptyInitInfo) -> None:
        self.shutdown()

    def start_weight_update(self) -> None:
        self._kept = set()
        super().start_weight_update()

    def receive_weights(self, update_info: CudaIpcUpdateInfo) -> None:
        """Load weights. Raises `RunError` if they are on another GPU than the engine."""
        if update_info.gpu != (own := gpu_of(self.device)):
            raise RunError(f"expected weights on the engine's GPU {own}, found some on {update_info.gpu}")
        if update_info.is_kept:
            self._kept.update(update_info.handles)
        parts = self._memory.parts(update_info.handles, update_info.places, update_info.tensor_sizes)
        self.model.load_weights(update_info.named(parts))

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._memory.close(self._kept)

    def shutdown(self) -> None:
        self._memory.close()


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


class BroadcastWeightTransferEngine(CheckpointEngine[BroadcastInitInfo, BroadcastUpdateInfo]):
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
