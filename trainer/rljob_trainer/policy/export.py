"""Exports of the policy: full parameters one by one, their digest, the model in Hugging Face format."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rljob_trainer.policy.lora import adapted_layers, is_adapter, merged_weight
from rljob_trainer.policy.model import CAUSAL_LM, PolicyModel, sent_name
from rljob_trainer.policy.optimizer import MasterAdamW
from rljob_trainer.policy.weight_loading import require_finite


@torch.no_grad()
def full_parameters(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each full parameter in `dtype`, by its name in the Hugging Face checkpoint. A tied head is left out.

    Adapters are added to the weights that they belong to.

    Collective: all ranks iterate in step, and gather one parameter at a time. A tensor may be the parameter itself, if
    it needs no cast and no gathering: read it before the next update, and do not write to it.
    """
    adapted = {f"{layer}.base_layer.weight": module for layer, module in adapted_layers(model).items()}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        if layer := adapted.get(name):
            tensor = merged_weight(layer, dtype)
        else:
            # Cast first: half the bytes to gather.
            shard = parameter.detach().to(dtype)
            tensor = shard.full_tensor() if isinstance(shard, DTensor) else shard
        yield sent_name(name), tensor


def weights_digest(optimizer: MasterAdamW) -> str:
    """SHA-256 of the names and the float32 masters of all trained parameters; the same on every rank. Collective."""
    digest = hashlib.sha256()
    for name, parameter in optimizer.parameters.items():
        digest.update(name.removeprefix(CAUSAL_LM).encode())
        if isinstance(parameter, DTensor):
            pieces = [parameter.full_tensor().detach()]
        else:
            pieces = [master for _, master in optimizer.master_pieces(name)]
        for piece in pieces:
            # A copy: memory that numpy has seen could not be freed in place (`policy_offload`).
            digest.update(piece.to("cpu", copy=True).contiguous().numpy().tobytes())
    return digest.hexdigest()


def export_pretrained(model: PolicyModel, dtype: torch.dtype, source_dir: Path, directory: Path) -> None:
    """Write the model in `dtype` to `directory`: safetensors, configuration, and the tokenizer files of `source_dir`.

    Collective; rank 0 writes. Raises `BadInput` if a weight is not finite.
    """
    writes = dist.get_rank() == 0
    # The other ranks keep nothing: each parameter is gathered and dropped.
    parameters = {name: tensor.cpu() for name, tensor in full_parameters(model, dtype) if writes}
    require_finite(parameters)
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        _copy_companions(source_dir, directory)
        model.causal_lm.config.dtype = dtype
        model.causal_lm.save_pretrained(directory, state_dict=parameters)
    dist.barrier()


def _copy_companions(source_dir: Path, directory: Path) -> None:
    """Copy the other files: tokenizer, chat template, generation settings, licence."""
    for file in source_dir.iterdir():
        weights = file.suffix in {".safetensors", ".bin", ".pt", ".pth", ".gguf"} or file.name.endswith(".index.json")
        if file.is_file() and not weights:
            shutil.copyfile(file, directory / file.name)
