"""Disk that a job needs for its checkpoints, its trained model, its model cache and compiled code."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.job import RLJobSpec
from rljob_memory.estimate import snapshot_bytes
from rljob_memory.planning.host_memory import DeviceKind
from rljob_memory.workload import ModelShape, Workload

_HUB_BYTES_PER_PARAMETER = 2
"""Models of the hub are stored in bfloat16."""

_COMPILED_BYTES = 1 << 30
"""Code that torch, Triton and vLLM compile for one model, and a copy while it is replaced: assumed. On a CPU,
forward and backward of one small layer take 0.6 MB (tests/integration/test_pods_run.py), but the trainer
compiles nothing there."""


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
    compiled_bytes: int
    """Compiled code; 0 if it is on another volume."""

    @property
    def total_bytes(self) -> int:
        return self.checkpoints * self.checkpoint_bytes + self.model_bytes + self.cache_bytes + self.compiled_bytes


def predicted_disk(spec: RLJobSpec, model: ModelShape, workload: Workload, device: DeviceKind) -> Disk:
    """The journal is not counted: a few MB a step, deleted with the checkpoints that cover it."""
    lora = spec.policy.lora
    exported = model.weight_bytes
    if lora is not None and lora.export == "Adapter":
        exported = 4 * model.adapter_parameters
    cached = spec.model.uri.startswith("hf://") and spec.model.cache is None
    on_claim = spec.model.cache is not None and spec.model.cache.compiled
    return Disk(
        checkpoint_bytes=snapshot_bytes(model, workload),
        checkpoints=spec.checkpoint.keep + 1,
        model_bytes=exported,
        cache_bytes=_HUB_BYTES_PER_PARAMETER * model.parameters if cached else 0,
        compiled_bytes=_COMPILED_BYTES if device == "cuda" and not on_claim else 0,
    )
