"""Metrics of an evaluation. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rljob_trainer.rollout_batch import Completion


def pass_at(k: int, successes: int, samples: int) -> float:
    """Probability that at least one of `k` responses succeeds, estimated without bias from `samples` of them, at least
    `k`: 1 - C(samples - successes, k) / C(samples, k).

    M. Chen et al.: "Evaluating Large Language Models Trained on Code" (2021), equation 1.
    """
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def evaluation_metrics(
    rewards: Sequence[float], completions: Sequence[Completion], samples: int, success_reward: float
) -> dict[str, float]:
    """Metrics by name. `rewards`, `completions`: `samples` for each prompt, prompt after prompt.

    avg@k is the share of successes among all responses; pass@j is given for powers of two up to k, and for k.
    """
    successes = [sum(group >= success_reward) for group in np.asarray(rewards).reshape(-1, samples)]
    lengths = [len(completion.token_ids) for completion in completions]
    attempts = sorted({1 << power for power in range(samples.bit_length())} | {samples})
    return {
        "reward_mean": float(np.mean(rewards)),
        "reward_std": float(np.std(rewards)),
        f"avg@{samples}": float(np.mean(successes)) / samples,
        **{f"pass@{k}": float(np.mean([pass_at(k, int(found), samples) for found in successes])) for k in attempts},
        "response_mean_tokens": float(np.mean(lengths)),
        "response_max_tokens": max(lengths),
        "clipped_ratio": float(np.mean([not completion.finished for completion in completions])),
    }
