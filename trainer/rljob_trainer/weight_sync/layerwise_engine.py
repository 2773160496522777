"""Shared by the engine's sides of all backends of our own. Imported only by vLLM's factory, since it imports vLLM.

The interface of vLLM's weight-transfer engines is the same from 0.26 to 0.32, except for `trainer_send_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

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
    """In bytes."""

    def unpacked(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the weights in `buffer`, uint8, by name."""
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
