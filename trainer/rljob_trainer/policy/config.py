"""The settings of a policy rank. Free of torch, so that the controller can make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rljob_trainer.algorithm.loss_config import LossConfig


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """The part of the memory plan that bears on a policy rank.

    `micro_batch_tokens`: most tokens in one forward and backward pass, padding included. `logprob_chunk_tokens`: tokens
    whose logits over the vocabulary exist at a time. `activation_checkpointing`: keep only each layer's input, and
    compute the rest again in backward. `optimizer_offload`: AdamW's moments lie in host memory between updates.
    `empty_cache`: hand cached GPU memory back when a phase has ended. `expandable_segments`: let the caching allocator
    grow its segments, which ends fragmentation by sequences of changing lengths. `detach_metrics`: keep the numbers of
    a micro-batch, not its graph. `sync_bucket_bytes`: weights that are sent to the engines at once. `weight_export`:
    where they are packed on a GPU, see `memory_mitigations.weight_export`.
    """

    micro_batch_tokens: int
    logprob_chunk_tokens: int
    activation_checkpointing: bool = False
    optimizer_offload: bool = False
    empty_cache: bool = True
    expandable_segments: bool = True
    detach_metrics: bool = True
    sync_bucket_bytes: int = 256 << 20
    weight_export: Literal["ReservedBuffer", "SwitchSegments"] = "SwitchSegments"


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Settings of a policy rank; the same for all ranks of a job.

    `model_dir`: Hugging Face format. `dtype`: of the forward and backward pass, and of what leaves the policy (to the
    engines, to the exported model); the parameters that are trained, and the gradients' sums, are float32.
    `learning_rate`: after a linear warm-up over the first `warmup_steps` steps of the job.
    `temperature`: what the logits are divided by, as in the engine. `updates_per_step`: optimizer steps a step.
    `output_dir`: of the run; the memory log goes to `memory/policy-<rank>.jsonl` there.
    """

    model_dir: Path
    output_dir: Path
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    learning_rate: float
    memory: PolicyMemory
    loss: LossConfig = field(default_factory=LossConfig)
    warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    updates_per_step: int = 1
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of `step`, counted from 1."""
        return self.learning_rate * min(1.0, step / max(self.warmup_steps, 1))
