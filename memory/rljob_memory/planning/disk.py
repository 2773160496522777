"""Disk that a job needs for its checkpoints, its trained model and its model cache."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.job import RLJobSpec
from rljob_memory.workload import ModelShape, Workload

_HUB_BYTES_PER_PARAMETER = 2
"""Models of the hub are stored in bfloat16."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes on the checkpoints' volume."""

    checkpoint_bytes: int
    """One checkpoint."""
    checkpoints: int
    """Checkpoints that exist at once: those that are kept, and the one that is being written."""
    model_bytes: int
    """The trained model."""
    cache_bytes: int
    """Cache of a model of the hub; 0 if it is on another volume."""

    @property
    def total_bytes(self) -> int:
        return self.checkpoints * self.checkpoint_bytes + self.model_bytes + self.cache_bytes


def predicted_disk(spec: RLJobSpec, model: ModelShape, workload: Workload) -> Disk:
    """The journal is not counted: a few MB a step, deleted with the checkpoints that cover it."""
    lora = spec.policy.lora
    exported = model.weight_bytes
    if lora is not None and lora.export == "Adapter":
        exported = 4 * model.adapter_parameters
    cached = spec.model.uri.startswith("hf://") and spec.model.cache is None
    return Disk(
        checkpoint_bytes=(4 + 2 * workload.moment_bytes) * model.trained_parameters,
        checkpoints=spec.checkpoint.keep + 1,
        model_bytes=exported,
        cache_bytes=_HUB_BYTES_PER_PARAMETER * model.parameters if cached else 0,
    )
