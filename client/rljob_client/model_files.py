"""The files of a model in Hugging Face format: settings and headers of the weights, and their damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rljob_client.errors import BadInput

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
"""The description of low-rank adapters, as peft writes it."""
BEST_MODEL = "best"
"""Directory of the model of the best evaluation, in an output directory."""
_LFS_POINTER = b"version https://git-lfs"
_COPY_AGAIN = "copy the files of the model again from their source"


def model_of_step(step: int) -> str:
    """Directory of the exported model of a step, in an output directory."""
    return f"models/step-{step:06d}"


def is_model(path: str) -> bool:
    """True if a path in an output directory is that of an exported model."""
    return path in ("model", BEST_MODEL) or path.startswith("models/")


def require_whole(directory: Path) -> None:
    """Raise `BadInput`, with the name of the file, if settings, weights or tokenizer are missing or truncated."""
    read_config(directory)
    weight_shapes(directory)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        read_json(directory / name)


def weight_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by name. Raises `BadInput` if a file is missing or truncated."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(directory):
        shapes |= _shapes_in(file)
    if missing := sorted(_indexed_names(directory) - shapes.keys()):
        raise BadInput(f"{directory / _INDEX} lists weights that its files lack: {', '.join(missing[:5])}")
    return shapes


def files_of_weights(directory: Path) -> dict[str, Path]:
    """The file of each tensor, by name. Raises `BadInput` if a file is missing or truncated."""
    return {name: file for file in weight_files(directory) for name in _shapes_in(file)}


def has_only_bfloat16(directory: Path) -> bool:
    """True if all weights are stored in bfloat16, so reading them as bfloat16 is exact."""
    return set(stored_types(directory).values()) <= {"BF16"}


def stored_types(directory: Path) -> dict[str, str]:
    """Data types of all tensors by name, as safetensors spells them, such as `BF16`. Raises `BadInput` as
    `weight_shapes`."""
    types: dict[str, str] = {}
    for file in weight_files(directory):
        types |= {name: kind for name, (_, kind) in _headers_in(file).items()}
    return types


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files. Raises `BadInput` if one is missing."""
    if (directory / _INDEX).is_file():
        names = sorted(set(_weight_map(directory).values()))
    elif (directory / _SINGLE).is_file():
        names = [_SINGLE]
    else:
        if broken := next((name for name in (_INDEX, _SINGLE) if (directory / name).is_symlink()), None):
            raise BadInput(f"expected weights in {directory / broken}, found {absent(directory / broken)}")
        raise BadInput(
            f"expected weights in {directory} as {_SINGLE} or {_INDEX}, found neither; "
            "convert older formats with save_pretrained of transformers"
        )
    for name in names:
        if not (directory / name).is_file():
            raise BadInput(
                f"expected the weights file {name}, which {directory / _INDEX} names, found {absent(directory / name)}"
            )
    return [directory / name for name in names]


def _indexed_names(directory: Path) -> set[str]:
    return set(_weight_map(directory)) if (directory / _INDEX).is_file() else set()


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"expected weight_map in {directory / _INDEX}, found none; {_COPY_AGAIN}")
    if other := next((name for name in weight_map.values() if not isinstance(name, str)), None):
        raise BadInput(
            f"expected names of files in weight_map of {directory / _INDEX}, found {other!r:.100}; {_COPY_AGAIN}"
        )
    return weight_map


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (shape, _) in _headers_in(file).items()}


def _headers_in(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and data type of the tensors by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        raise BadInput(
            f"cannot read the weights in {file}, it is truncated or not a safetensors file: {error}; {advice(file)}"
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """The settings of the model in `directory`. Raises `BadInput` if they are missing or unreadable."""
    config = read_json(directory / "config.json")
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and all(isinstance(each, str) for each in architectures)):
        raise BadInput(
            f'expected architectures in {directory / "config.json"}, such as ["Qwen3ForCausalLM"], found '
            f"{architectures or 'none'}; copy the file again from its source"
        )
    return config


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model. Raises `BadInput` if it is missing, unreadable or not an object."""
    try:
        if file.exists() and not file.is_file():
            raise BadInput(f"expected {file.name} in the model directory {file.parent}, found no regular file")
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if (file.parent / ADAPTER).is_file():
            raise BadInput(
                f"expected {file.name} in the model directory {file.parent}, found {ADAPTER}: it holds low-rank "
                "adapters without their model. Merge them (merge_and_unload of peft, or policy.lora.export: Merged), "
                "and save the tokenizer in the model's directory"
            ) from error
        raise BadInput(
            f"expected {file.name} in the model directory {file.parent}, found {absent(file)}; {_COPY_AGAIN}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {file}: {error}; {advice(file)}") from error
    if not isinstance(content, dict):
        raise BadInput(f"expected a JSON object in {file}, found {type(content).__name__}")
    return content


def absent(file: Path) -> str:
    """The description of a file that does not exist. The snapshots of a hub cache are symbolic links."""
    if not file.is_symlink():
        return "none"
    return (
        f"a symbolic link to {file.readlink()}, which is missing; copy the files with those that they link to (cp -L)"
    )


def advice(file: Path) -> str:
    """The advice for a file that cannot be read."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        is_pointer = False
    return "it is a pointer of Git LFS: fetch the file with git lfs pull" if is_pointer else _COPY_AGAIN
