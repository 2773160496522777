"""The settings of a policy rank. Free of torch, so that the controller can make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rljob_api.memory_plan import MemoryPlan
from rljob_trainer.algorithm.loss_config import LossConfig


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Settings of low-rank adapters."""

    rank: int

    alpha: float
    """The product of an adapter's matrices is multiplied by `alpha / rank`."""

    targets: tuple[str, ...]
    """Ends of the names of the linear layers with an adapter; not empty."""

    dropout: float = 0.0

    export: Literal["Merged", "Adapter"] = "Merged"
    """The model that is exported: the merged one, or the adapters alone."""

    base_model: str = ""
    """Name of the initial model for the configuration of exported adapters."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Settings of a policy rank; the same for all ranks of a job."""

    model_dir: Path
    """The initial model, in Hugging Face format."""

    output_dir: Path
    """Output directory of the run. The memory log goes to `memory/policy-<rank>.jsonl` in it."""

    device: Literal["cpu", "cuda"]

    dtype: Literal["float32", "bfloat16"]
    """Data type of the forward and backward pass, of weights that are frozen beside adapters, and of the weights that
    are sent to the engines or exported. Master weights and the sums of gradients are float32."""

    learning_rate: float
    """After the warm-up."""

    memory: MemoryPlan
    """The part of it that concerns the engine or the pods is ignored."""

    loss: LossConfig = field(default_factory=LossConfig)

    warmup_steps: int = 0
    """The learning rate grows linearly over the first so many steps of the job."""

    adam_beta1: float = 0.9

    adam_beta2: float = 0.999

    weight_decay: float = 0.01

    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """Of AdamW's two moments. bfloat16 ones are rounded stochastically; int8 ones are quantized by blocks."""

    max_grad_norm: float = 1.0
    """Gradients are clipped to this L2 norm over all parameters."""

    temperature: float = 1.0
    """Divides the logits, as in the engine."""

    updates_per_step: int = 1
    """Optimizer steps in each step of the job."""

    seed: int = 0

    snapshots: bool = False
    """Keep a copy of the state before each update in host memory, to undo an interrupted update of several ranks."""

    checkpoint_copy: bool = True
    """Write checkpoints from a copy of the state in host memory while the next steps run. If False, they are written
    from the state itself, and the next optimizer step waits."""

    compile_ahead: bool = False
    """Compile the layers when the model is loaded, while the engine starts, instead of in the first update."""

    copy_frozen_weights: bool = True
    """With `policy_offload`: keep a copy of weights that are not trained in host memory. Otherwise they are read from
    `model_dir` again when they return to the device."""

    lora: LoraConfig | None = None
    """Low-rank adapters, which are trained instead of the model's weights."""

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of `step`, counted from 1."""
        return self.learning_rate * min(1.0, step / max(self.warmup_steps, 1))
