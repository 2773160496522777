"""The settings of a policy rank. Free of torch, so that the controller can make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rljob_api.memory_plan import MemoryPlan
from rljob_trainer.algorithm.loss_config import LossConfig


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Settings of a policy rank; the same for all ranks of a job."""

    model_dir: Path
    """The initial model, in Hugging Face format."""

    output_dir: Path
    """Output directory of the run. The memory log goes to `memory/policy-<rank>.jsonl` in it."""

    device: Literal["cpu", "cuda"]

    dtype: Literal["float32", "bfloat16"]
    """Of the forward and backward pass, and of the weights that are sent to the engines or exported. The trained
    parameters and the sums of their gradients are float32."""

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

    max_grad_norm: float = 1.0
    """Gradients are clipped to this L2 norm over all parameters."""

    temperature: float = 1.0
    """Divides the logits, as in the engine."""

    updates_per_step: int = 1
    """Optimizer steps in each step of the job."""

    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of `step`, counted from 1."""
        return self.learning_rate * min(1.0, step / max(self.warmup_steps, 1))
