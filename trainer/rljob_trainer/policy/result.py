"""What a policy rank answers. Free of torch, so that the controller can read it."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_memory.sample import MemorySample


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """`parameters`: numbers in the model, tied ones counted once. `vocabulary`: rows of the output embedding."""

    architecture: str
    parameters: int
    layers: int
    vocabulary: int
    tied_embeddings: bool


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """One step's update: metrics over the whole batch, the same on every rank; this rank's memory, with the update's
    peaks.

    `metrics`: loss, entropy, ppo_kl, kl (with a reference model), clip_fraction_{low,high,dual}, grad_norm (before
    clipping), learning_rate, importance_weight_{mean,max}, logprob_diff_{mean,max} (between engine and policy), tokens,
    dropped_tokens (the engine gave no finite log-probability), micro_batches (on each rank), skipped_updates (not
    applied, since the gradient was not finite).
    """

    metrics: dict[str, float]
    memory: MemorySample
    seconds: float
