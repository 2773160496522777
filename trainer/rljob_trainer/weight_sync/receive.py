"""The engine's side of a weight sync, as far as vLLM leaves it to us."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def weight_transfer_backend(device: Literal["cpu", "cuda"]) -> str:
    """The name of vLLM's weight-transfer backend for `device`, known to vLLM from now on."""
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
    """Forget the tensors that an interrupted update left waiting for the rest of their layer.

    vLLM counts elements to see when a layer is complete: left there, they would complete it in the next update with
    weights of both versions.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
