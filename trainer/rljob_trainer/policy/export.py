"""What leaves the policy: its parameters one by one, their digest, the model in Hugging Face format."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rljob_trainer.policy.model import CAUSAL_LM, PolicyModel


@torch.no_grad()
def full_parameters(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each parameter whole, in `dtype`, by its name in the Hugging Face checkpoint; a tied head is left out.

    All ranks iterate in step: gathering is collective. One parameter is gathered at a time. A tensor may be the
    parameter itself, where no cast and no gathering is needed: read it before the next update, and do not write to it.
    """
    for name, parameter in model.named_parameters():
        # Cast first: half the bytes to gather.
        shard = parameter.detach().to(dtype)
        yield name.removeprefix(CAUSAL_LM), shard.full_tensor() if isinstance(shard, DTensor) else shard


def weights_digest(model: PolicyModel) -> str:
    """SHA-256 over the names and the float32 bits of all parameters. All ranks call it, and get the same."""
    digest = hashlib.sha256()
    for name, parameter in full_parameters(model, torch.float32):
        digest.update(name.encode())
        digest.update(parameter.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def export_pretrained(model: PolicyModel, dtype: torch.dtype, source_dir: Path, directory: Path) -> None:
    """Write the model in `dtype` to `directory`: safetensors, config, and the tokenizer's files of `source_dir`.

    All ranks call it; rank 0 writes.
    """
    writes = dist.get_rank() == 0
    # On the other ranks nothing is kept: each parameter is gathered and let go.
    parameters = {name: tensor.cpu() for name, tensor in full_parameters(model, dtype) if writes}
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        _copy_companions(source_dir, directory)
        model.causal_lm.config.dtype = dtype
        model.causal_lm.save_pretrained(directory, state_dict=parameters)
    dist.barrier()


def _copy_companions(source_dir: Path, directory: Path) -> None:
    """The files beside the weights: tokenizer, chat template, generation settings, licence."""
    for file in source_dir.iterdir():
        weights = file.suffix in {".safetensors", ".bin", ".pt", ".pth", ".gguf"} or file.name.endswith(".index.json")
        if file.is_file() and not weights:
            shutil.copyfile(file, directory / file.name)
