"""CPU backend, the engine's side. Imported only by vLLM's factory, since it imports vLLM."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass
class ObjectStoreInitInfo(WeightTransferInitInfo):
    """Empty: Ray locates the tensors."""


@dataclass
class ObjectStoreUpdateInfo(WeightTransferUpdateInfo):
    """One bucket of weights. The lists are parallel."""

    names: list[str]
    """Checkpoint names."""

    dtype_names: list[str]

    shapes: list[list[int]]

    tensor_sizes: list[int]
    """In bytes."""

    buffer: npt.NDArray[np.uint8]
    """The tensors end to end, read-only in shared memory."""


class ObjectStoreWeightTransferEngine(WeightTransferEngine[ObjectStoreInitInfo, ObjectStoreUpdateInfo]):
    """Loads tensors that Ray's object store maps into this process."""

    init_info_cls = ObjectStoreInitInfo
    update_info_cls = ObjectStoreUpdateInfo

    def init_transfer_engine(self, init_info: ObjectStoreInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ObjectStoreUpdateInfo) -> None:
        self.model.load_weights(_unpacked(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.model_config.hf_config.tie_word_embeddings:
            # On the CPU the output layer keeps a packed copy of its weight. If the weight is tied to the embedding, the
            # reload receives none for this layer and silently keeps the old copy.
            dispatch_cpu_unquantized_gemm(self.model.lm_head, remove_weight=False)

    def shutdown(self) -> None:
        pass


def _unpacked(update: ObjectStoreUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    with warnings.catch_warnings():
        # torch has no read-only tensors; nothing writes to these.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        parts = torch.from_numpy(update.buffer).split(update.tensor_sizes)
    for name, dtype, shape, part in zip(update.names, update.dtype_names, update.shapes, parts, strict=True):
        yield name, part.view(getattr(torch, dtype)).view(shape)
