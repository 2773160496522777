"""Settings and results of a policy rank. Free of torch, so that the controller can import them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.roles import LoraSpec
from rljob_memory.sample import MemorySample


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Settings of a policy rank; the same for all ranks of a job."""

    model_dir: Path
    """The initial model, in Hugging Face format."""

    output_dir: Path
    """Output directory of the run. The memory log goes to `memory/policy-<rank>.jsonl` in it."""

    device: Literal["cpu", "cuda"]

    dtype: Literal["float32", "bfloat16"]
    """Data type of the forward and backward pass, of frozen weights with adapters, and of the weights that
    are sent to the engines or exported. Master weights and the sums of gradients are float32."""

    algorithm: AlgorithmSpec

    memory: MemoryPlan
    """The part of it that concerns the engine or the pods is ignored."""

    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """Data type of AdamW's two moments. bfloat16 ones are rounded stochastically; int8 ones are quantized by blocks."""

    snapshots: bool = False
    """Keep a copy of the state before each update in host memory, to undo an interrupted update of several ranks."""

    checkpoint_copy: bool = True
    """Write checkpoints from a copy of the state in host memory while the next steps run. If False, they are written
    from the state itself, and the next optimizer step waits."""

    compile_ahead: bool = False
    """Compile the layers when the model is loaded, while the engine starts, instead of in the first update."""

    copy_frozen_weights: bool = True
    """Effective with `policy_offload`: keep a copy of weights that are not trained in host memory. Otherwise they are
    read from `model_dir` again when they return to the device."""

    lora: LoraSpec | None = None
    """Low-rank adapters, which are trained instead of the model's weights. Its targets are not empty."""

    base_model: str = ""
    """Name of the initial model for the configuration of exported adapters."""

    task_directory: Path = Path()
    """Directory of the user's Python modules: that of `algorithm.loss`."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The update of one step."""

    metrics: dict[str, float]
    """Metrics of the whole batch, the same on every rank: loss, entropy, ppo_kl, kl (with a reference model),
    clip_fraction_{low,high,dual}, grad_norm (before clipping), learning_rate, importance_weight_{mean,max},
    importance_ess, logprob_diff_{mean,max} (between engine and policy), tokens, dropped_tokens (the engine's
    log-probability is not finite), skipped_tokens (without gradient), micro_batches (on each rank), skipped_updates
    (the gradient was not finite). Means and maxima are over the tokens that are not skipped."""

    memory: MemorySample
    """Memory of this rank, with the peaks of the update."""

    seconds: float
