"""The engine's side of a weight sync: registers the backend, and cleans up after an interrupted update."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def weight_transfer_backend(device: Literal["cpu", "cuda"]) -> str:
    """The name of the weight-transfer backend for `device`. Registers it with vLLM if necessary."""
    if device == "cuda":
        return "ipc"
    _register_object_store()
    return "object_store"


@cache
def _register_object_store() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        "object_store", "rljob_trainer.weight_sync.object_store_engine", "ObjectStoreWeightTransferEngine"
    )


def drop_buffered_weights(model: torch.nn.Module) -> None:
    """Drop the tensors of incomplete layers after an interrupted update.

    vLLM counts elements to decide when a layer is complete. Otherwise the next update would complete it with weights of
    two versions.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
