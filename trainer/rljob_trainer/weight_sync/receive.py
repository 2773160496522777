"""The engine's side of a weight sync: registers its backend, and cleans up after an interrupted update."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def shared_memory_backend(device: Literal["cpu", "cuda"]) -> str:
    """The name of the backend that reads weights from memory of the same machine: CUDA IPC, or Ray's object store."""
    if device == "cuda":
        return "ipc"
    return _registered("object_store", "ObjectStoreWeightTransferEngine")


def broadcast_backend() -> str:
    """The name of the backend that receives weights from a policy on another GPU or machine."""
    return _registered("rljob_broadcast", "BroadcastWeightTransferEngine")


@cache
def _registered(backend: str, engine: str) -> str:
    """`backend`, under which vLLM now finds the class `engine`."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(backend, "rljob_trainer.weight_sync.engine_side", engine)
    return backend


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
