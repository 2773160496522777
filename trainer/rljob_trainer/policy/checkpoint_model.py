"""The model of a checkpoint in Hugging Face format, without processes or a GPU: one weight at a time is in memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from rljob_api.roles import LoraSpec
from rljob_client.model_files import files_of_weights
from rljob_trainer.ledger.checkpoint_manifest import CheckpointManifest, writer_of
from rljob_trainer.models.checkpoint import policy_weight_shapes
from rljob_trainer.policy.checkpoint_layout import WEIGHTS
from rljob_trainer.policy.export import write_description, write_weights
from rljob_trainer.policy.lora import is_adapter, merged, write_adapters
from rljob_trainer.policy.model import CAUSAL_LM, sent_name
from rljob_trainer.policy.optimizer_state import split
from rljob_trainer.policy.weight_loading import require_finite, rows_of


@dataclass(frozen=True, slots=True)
class CheckpointModel:
    """The model of the checkpoint in `directory`, whose files are known to be whole."""

    directory: Path

    dtype: torch.dtype
    """The compute dtype of the run, in which the model is written."""

    source_dir: Path
    """The initial model. Its weights are needed for adapters alone."""

    lora: LoraSpec | None

    base_model: str
    """See `PolicyConfig`."""

    def write(self, target: Path) -> None:
        """Write what the run itself would export. Raises `BadInput` if a weight is not finite."""
        weights = _CheckpointWeights(self.directory, self.dtype)
        if self.lora is not None and self.lora.export == "Adapter":
            adapters = {name.removeprefix(CAUSAL_LM): weights.tensor(name) for name in weights.shapes}
            write_adapters(adapters, self.lora, self.base_model, target)
            return
        write_description(self.source_dir, target, self.dtype)
        if self.lora is None:
            shapes = {sent_name(name): tuple(shape) for name, shape in weights.shapes.items()}
            write_weights(shapes, self.dtype, _finite(self._trained(weights)), target)
        else:
            shapes = policy_weight_shapes(self.source_dir)
            write_weights(shapes, self.dtype, _finite(self._merged(weights, self.lora)), target)

    def _trained(self, weights: _CheckpointWeights) -> Iterator[tuple[str, Tensor]]:
        for name in weights.shapes:
            yield sent_name(name), weights.tensor(name)

    def _merged(self, weights: _CheckpointWeights, lora: LoraSpec) -> Iterator[tuple[str, Tensor]]:
        files = files_of_weights(self.source_dir)
        for name, shape in policy_weight_shapes(self.source_dir).items():
            frozen = rows_of(files[name], name, 0, shape[0]).to(self.dtype)
            layer = f"{CAUSAL_LM}{name.removesuffix('.weight')}"
            first, second = (f"{layer}.{matrix}.default.weight" for matrix in ("lora_A", "lora_B"))
            if first in weights.shapes:
                scaling = lora.alpha / lora.rank
                frozen = merged(frozen, weights.tensor(first), weights.tensor(second), scaling, self.dtype)
            yield name, frozen


def _finite(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        require_finite({name: tensor})
        yield name, tensor


class _CheckpointWeights:
    """The trained weights of a checkpoint as the policy had them, by the names of its parameters."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        metadata = FileSystemReader(directory).read_metadata()
        self._directory, self._places = directory, metadata.storage_data
        self._saved = {
            name.removeprefix(WEIGHTS): saved
            for name, saved in metadata.state_dict_metadata.items()
            if name.startswith(WEIGHTS) and isinstance(saved, TensorStorageMetadata)
        }
        self.shapes = {name: saved.size for name, saved in self._saved.items()}
        of_one_rank = {writer_of(name) for name in CheckpointManifest.load(directory).files} <= {0, None}
        # A single rank keeps the rounded weights of its masters; several ranks keep the masters, also of adapters.
        self._rounds = of_one_rank and dtype == torch.bfloat16
        self._dtype = dtype

    def tensor(self, name: str) -> Tensor:
        """A weight in the compute dtype; an adapter of several ranks in float32."""
        saved = self._saved[name]
        dtype = torch.float32 if is_adapter(name) and not self._rounds else self._dtype
        whole = torch.empty(saved.size, dtype=dtype)
        for chunk in saved.chunks:
            place = self._places[MetadataIndex(f"{WEIGHTS}{name}", chunk.offsets)]
            with (self._directory / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                piece = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = split(piece.contiguous())[0] if self._rounds else piece.to(dtype)
        return whole
