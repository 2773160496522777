"""Low-rank adapters: peft's layers in the policy's model, the weights with the adapters added, and their export.

An adapter is never merged into the frozen weights: a sum in bfloat16, taken back after each step, would leave rounding
errors in them. The engine and the export get `W + alpha / rank · B · A`, formed for one weight at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rljob_api.roles import LoraSpec
from rljob_client.errors import BadInput
from rljob_client.run_directory.durable_files import writing
from rljob_trainer.policy.gradients import full
from rljob_trainer.policy.weight_loading import require_finite

_ADAPTER = "default"
"""Name of the only adapter, in peft."""

_FROZEN = ".base_layer."
"""Part of the name of a weight that has an adapter."""


def add_adapters(causal_lm: nn.Module, lora: LoraSpec, seed: int) -> None:
    """Freeze the model and add adapters in float32, which do not change its output yet.

    B is zero. A is drawn from a uniform distribution, as in peft, but with a seed that follows from `seed` and the name
    of the layer: it is the same on all ranks and in all attempts. The adapters are on the CPU, also if the model is on
    the meta device.
    """
    from peft import inject_adapter_in_model

    causal_lm.requires_grad_(False)
    # Otherwise the first layer's input would differ from that of the others, and the layers would be compiled twice.
    causal_lm.enable_input_require_grads()  # type: ignore[operator]
    inject_adapter_in_model(_peft_config(lora), causal_lm)
    for name, layer in adapted_layers(causal_lm).items():
        first, second = layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]
        generator = torch.Generator().manual_seed(_seed_of(name, seed))
        values = torch.empty(first.weight.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        first.weight = nn.Parameter(values)
        second.weight = nn.Parameter(torch.zeros(second.weight.shape))


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by name."""
    # Recognized without peft, whose import takes seconds that a job without adapters need not spend.
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def is_adapter(parameter_name: str) -> bool:
    return f".{_ADAPTER}." in parameter_name and (".lora_A." in parameter_name or ".lora_B." in parameter_name)


def checkpoint_name(parameter_name: str) -> str:
    """The name of a frozen parameter without peft's part."""
    return parameter_name.replace(_FROZEN, ".")


@torch.no_grad()
def merged_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """The full weight, [out, in] in `dtype`, with the adapter added in float32. A new tensor. Collective."""
    first, second = (full(matrix[_ADAPTER].weight) for matrix in (layer.lora_A, layer.lora_B))
    return merged(full(layer.base_layer.weight), first, second, layer.scaling[_ADAPTER], dtype)


def merged(frozen: Tensor, first: Tensor, second: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """`frozen` [out, in] + `scaling` · `second` [out, rank] · `first` [rank, in], in float32, as a new tensor in
    `dtype`."""
    weight = frozen.to(torch.float32, copy=True)
    return weight.addmm_(second.float(), first.float(), alpha=scaling).to(dtype)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within the block, the model computes with its frozen weights alone: those of the initial model."""
    # Not peft's `disable_adapters`, which also stops their gradients, and FSDP expects these.
    layers = adapted_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Within the block, adapters drop nothing. Does nothing without dropout."""
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout) and module.training]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()


@torch.no_grad()
def export_adapter(causal_lm: nn.Module, lora: LoraSpec, base_model: str, directory: Path) -> None:
    """Write the adapters to `directory`, in the format of peft. Collective; rank 0 writes.

    Raises `BadInput` if a weight is not finite.
    """
    tensors = {name: full(each).cpu() for name, each in causal_lm.named_parameters() if is_adapter(name)}
    require_finite(tensors)
    if dist.get_rank() == 0:
        with writing(directory):
            write_adapters(tensors, lora, base_model, directory)
    dist.barrier()


def write_adapters(tensors: Mapping[str, Tensor], lora: LoraSpec, base_model: str, directory: Path) -> None:
    """Write the adapters, by the names of their parameters in the causal language model, in the format of peft.

    Raises `BadInput` if a weight is not finite.
    """
    from safetensors.torch import save_file

    require_finite(tensors)
    write_adapter_description(lora, base_model, directory)
    # peft's names: those of the whole model's wrapper, without the adapter's.
    named = {f"base_model.model.{name}".replace(f".{_ADAPTER}.", "."): each for name, each in tensors.items()}
    contiguous = {name: each.contiguous() for name, each in named.items()}
    save_file(contiguous, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def write_adapter_description(lora: LoraSpec, base_model: str, directory: Path) -> None:
    """Write everything but the adapters' weights. `base_model`: see `PolicyConfig`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _peft_config(lora)
    config.base_model_name_or_path = base_model or None
    config.inference_mode = True
    config.save_pretrained(str(directory))


def _peft_config(lora: LoraSpec) -> Any:
    from peft import LoraConfig

    try:
        return LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            target_modules=lora.targets,
            lora_dropout=lora.dropout,
            bias="none",
            task_type="CAUSAL_LM",
        )
    except ValueError as error:
        raise BadInput(f"policy.lora: peft cannot use these settings: {error}; change them") from error


def _seed_of(layer: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{layer}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
