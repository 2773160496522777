"""Weights as safetensors files in Hugging Face format, which hold at most a few GB each and are written one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

_INDEX = "model.safetensors.index.json"


def write_weights(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]], directory: Path
) -> None:
    """Write `tensors`, which have these `shapes` by name. A file is written as soon as it is complete: if they come in
    the order of `shapes`, host memory holds one file."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(
        {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, shape in shapes.items()}
    )
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        file = split.tensor_to_filename[name]
        of_file = held.setdefault(file, {})
        of_file[name] = tensor.contiguous()
        if len(of_file) == len(split.filename_to_tensors[file]):
            save_file(held.pop(file), directory / file, metadata={"format": "pt"})
        del of_file
    assert not held, "all tensors were given"
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
