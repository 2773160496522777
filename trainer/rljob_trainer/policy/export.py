"""Exports of the policy: full parameters one after the other, and the model in Hugging Face format."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_client.errors import BadInput
from rljob_client.model_files import read_config
from rljob_client.run_directory.durable_files import writing
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.gradients import gathered
from rljob_trainer.policy.lora import adapted_layers, is_adapter, merged_weight, write_adapter_description
from rljob_trainer.policy.model import PolicyModel, sent_name
from rljob_trainer.policy.weight_loading import diverged, is_finite

_WEIGHTS = frozenset(
    ".safetensors .bin .pt .pth .ckpt .gguf .ggml .h5 .msgpack .ot .onnx .onnx_data .tflite .npz .nemo".split()  # noqa: SIM905
)
"""Ends of the names of files with the initial weights, in the formats of all libraries."""

_INDEX = "model.safetensors.index.json"

_MORE_TEMPLATES = "additional_chat_templates"
"""Directory of the tokenizer's other chat templates."""


@torch.no_grad()
def full_parameters(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each parameter in `dtype`, with its name and its full shape in the Hugging Face checkpoint, without a tied head.

    Adapters are added to the weights that they belong to.

    Collective: all ranks iterate in step, and gather one layer at a time. A tensor may be the parameter itself, if it
    needs no cast and no gathering: read it before the next update, and do not write to it.
    """
    adapted = {f"{layer}.base_layer.weight": module for layer, module in adapted_layers(model).items()}
    of_weights = ((name, each) for name, each in model.named_parameters() if not is_adapter(name))
    for _, group in groupby(of_weights, key=lambda named: _layer_of(named[0])):
        members = list(group)
        plain = [parameter for name, parameter in members if name not in adapted]
        whole = iter(gathered(plain, dtype))
        for name, _ in members:
            yield sent_name(name), merged_weight(adapted[name], dtype) if name in adapted else next(whole)


def _layer_of(name: str) -> str:
    """The start of the names of the parameters that are gathered together with this one: `causal_lm.model.layers.7.`"""
    layer = re.match(r".*\.layers\.\d+\.", name)
    return layer.group() if layer else name


def export_pretrained(model: PolicyModel, dtype: torch.dtype, source_dir: Path, directory: Path) -> None:
    """Write the model in `dtype` to `directory`: safetensors, and the other files of `source_dir`.

    Collective; rank 0 writes. Raises `BadInput` if a weight is not finite.
    """
    not_finite: list[str] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in full_parameters(model, dtype):
            if not is_finite(tensor):
                not_finite.append(name)
            yield name, tensor.cpu()

    shapes = {sent_name(name): each.shape for name, each in model.named_parameters() if not is_adapter(name)}
    if dist.get_rank() == 0:
        with writing(directory):
            write_description(source_dir, directory, dtype)
            write_weights(shapes, dtype, gathered(), directory)
    else:
        for _ in full_parameters(model, dtype):
            pass  # gathered with the others, and dropped
    if not_finite:
        shutil.rmtree(directory)
        raise diverged(not_finite, len(shapes))
    dist.barrier()


def write_weights(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]], directory: Path
) -> None:
    """Write `tensors`, which have these `shapes` by name, as safetensors files of a few GB at most.

    A file is written as soon as it is complete: if they come in the order of `shapes`, host memory holds one file.
    """
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


def write_description(source_dir: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write everything but the weights: the files of `source_dir` as they are, and the data type in `config.json`.

    The trained weights have the names and shapes of `source_dir`. transformers does not write its settings: it refuses
    to save some of those that it reads.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file in source_dir.iterdir():
        if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
            _copy(file, directory / file.name)
    if (templates := source_dir / _MORE_TEMPLATES).is_dir():
        shutil.copytree(templates, directory / _MORE_TEMPLATES, copy_function=_copy)
    config = read_config(source_dir)
    names = {"dtype", "torch_dtype"} & config.keys() or {"dtype"}
    config |= dict.fromkeys(names, str(dtype).removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _copy(source: str | Path, target: str | Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        if str(error.filename) != str(source):
            raise
        raise BadInput(
            f"cannot read {source}: {error.strerror}; make it readable for this user, or remove it"
        ) from error


def rehearse_output(config: PolicyConfig, rank: int) -> None:
    """Write and remove what a rank can write before the first step: a failure after the last one comes too late.

    A directory among the checkpoints; on rank 0, which writes the model, also the model, with a weight of one element.
    Raises `OutputUnavailable` if this rank, which may be on a machine of its own, cannot write them.
    """
    checkpoints, lora = config.output_dir / "checkpoints", config.lora
    with writing(checkpoints):
        checkpoints.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="rehearsal-", dir=checkpoints):
            pass
    if rank > 0:
        return
    # With a prefix that the export of a later attempt removes.
    with writing(config.output_dir), tempfile.TemporaryDirectory(prefix="model.partial-", dir=config.output_dir) as at:
        if lora is not None and lora.export == "Adapter":
            write_adapter_description(lora, config.base_model, Path(at))
        else:
            write_description(config.model_dir, Path(at), getattr(torch, config.dtype))
            write_weights({"rehearsal": (1,)}, torch.float32, [("rehearsal", torch.zeros(1))], Path(at))
