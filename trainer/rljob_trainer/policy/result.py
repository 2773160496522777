"""Results of a policy rank. Free of torch, so that the controller can import them."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_memory.sample import MemorySample


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model."""

    architecture: str
    """Name of its class in transformers."""

    parameters: int
    """Number of parameters; tied ones count once."""

    layers: int

    vocabulary: int
    """Rows of the output embedding."""

    tied_embeddings: bool


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The update of one step."""

    metrics: dict[str, float]
    """Metrics of the whole batch, the same on every rank: loss, entropy, ppo_kl, kl (with a reference model),
    clip_fraction_{low,high,dual}, grad_norm (before clipping), learning_rate, importance_weight_{mean,max},
    logprob_diff_{mean,max} (between engine and policy), tokens, dropped_tokens (the engine's log-probability is not
    finite), skipped_tokens (without gradient), micro_batches (on each rank), skipped_updates (the gradient was not
    finite). Means and maxima are over the tokens that are not skipped."""

    memory: MemorySample
    """Of this rank, with the peaks of the update."""

    seconds: float
