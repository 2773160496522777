"""Compares the log-probabilities of an engine with those of the policy that sends it weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from rljob_trainer.rollout.colocated_engine import ColocatedEngine
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollout_batch import Completion


class EngineHost(ColocatedEngine):
    """Builds one engine after another in one process, because importing vLLM takes long."""

    def __init__(self) -> None:
        self._llm = None

    def restart(self, config: RolloutConfig, environment: Mapping[str, str] | None = None) -> None:
        """Start an engine in place of the last one. `environment`: variables to set before."""
        self.shutdown()
        os.environ |= environment or {}
        super().__init__(0, config)
        self.start()

    def count_unfinished(self) -> int:
        """`unfinished_sequences`, for callers in other processes."""
        return self.unfinished_sequences


def perturb(policy: torch.nn.Module, seed: int) -> None:
    """Change every weight, so that a test fails if an engine keeps its old weights."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))


def largest_difference(
    policy: torch.nn.Module, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], temperature: float
) -> float:
    """Largest |log-probability of the engine − of the policy|, in nats, over all tokens of all completions; NaN if one
    of them is NaN.

    `policy`: a model of transformers. `completions`: group-major, equally many for each prompt.
    """
    group_size, differences = len(completions) // len(prompts), [torch.zeros(1)]
    for index, completion in enumerate(completions):
        prompt, response = list(prompts[index // group_size]), list(completion.token_ids)
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        differences.append((expected - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(differences).max())
