from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from rljob_api.algorithm import AlgorithmSpec, ImportanceSamplingSpec
from rljob_trainer.algorithm.micro_batch import MicroBatch
from rljob_trainer.algorithms.losses import clipped_ratio
from rljob_trainer.algorithms.objective import LossMetrics, policy_loss

Mode = Literal["Truncate", "Mask", "Disabled"]


def algorithm_of(mode: Mode = "Disabled", cap: float = 2.0, **settings: Any) -> AlgorithmSpec:
    return AlgorithmSpec(steps=1, importance_sampling=ImportanceSamplingSpec(mode=mode, cap=cap), **settings)


PPO = algorithm_of()


@dataclass
class ResponseTokens:
    """T response tokens: tensors of [T]."""

    logprobs: Tensor
    entropy: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_weights: Tensor
    mean_weights: Tensor
    reference_logprobs: Tensor | None = None

    def loss(self, algorithm: AlgorithmSpec) -> tuple[Tensor, LossMetrics]:
        rows = torch.arange(len(self.logprobs))
        micro_batch = MicroBatch(
            completions=[0],
            response_lengths=[len(rows)],
            packing={},
            input_ids=rows[None],
            hidden_rows=rows,
            targets=rows,
            sequence=torch.zeros_like(rows),
            advantages=self.advantages,
            rollout_logprobs=self.rollout_logprobs,
            loss_weights=self.loss_weights,
            mean_weights=self.mean_weights,
        )
        return policy_loss(
            micro_batch,
            self.logprobs,
            self.entropy,
            algorithm,
            clipped_ratio,
            old_logprobs=self.old_logprobs,
            reference_logprobs=self.reference_logprobs,
        )


def one_token(ratio: float, advantage: float, **values: float) -> ResponseTokens:
    """A token whose ratio policy / old policy is `ratio`; the engine agrees with the old one unless `values` differ."""
    old = -1.0
    tensors: dict[str, Any] = {
        "logprobs": torch.tensor([old + math.log(ratio)], requires_grad=True),
        "entropy": torch.zeros(1),
        "old_logprobs": torch.tensor([old]),
        "rollout_logprobs": torch.tensor([old]),
        "advantages": torch.tensor([advantage]),
        "loss_weights": torch.ones(1),
        "mean_weights": torch.ones(1),
    }
    return ResponseTokens(**(tensors | {name: torch.tensor([value]) for name, value in values.items()}))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "counted_as"),
    [
        (1.2, 2.0, -2.4, -2.4, None),
        (1.5, 2.0, -2.56, 0.0, "clip_fraction_high"),  # −A · 1.28
        (0.5, 2.0, -1.0, -1.0, None),  # a good token that became less likely is always pulled back
        (0.5, -2.0, 1.6, 0.0, "clip_fraction_low"),  # −A · 0.8
        (1.5, -2.0, 3.0, 3.0, None),
        (4.0, -2.0, 6.0, 0.0, "clip_fraction_dual"),  # at most −A · 3
    ],
)
def test_the_objective_is_clipped_only_on_its_unbounded_side(
    ratio: float, advantage: float, loss: float, gradient: float, counted_as: str | None
) -> None:
    tokens = one_token(ratio, advantage)
    found, metrics = tokens.loss(PPO)
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.item() == pytest.approx(gradient, rel=1e-5)
    counted = {name for name, value in metrics.sums.items() if name.startswith("clip_fraction") and value}
    assert counted == ({counted_as} if counted_as else set())


@pytest.mark.parametrize(
    ("mode", "engine_ratio", "weight"),
    [
        ("Disabled", 8.0, 1.0),
        ("Truncate", 1.5, 1.5),
        ("Truncate", 8.0, 2.0),
        ("Truncate", 0.1, 0.1),
        ("Mask", 1.5, 1.5),
        ("Mask", 8.0, 0.0),
        ("Mask", 0.1, 0.0),
    ],
)
def test_tokens_are_weighed_by_how_far_engine_and_policy_disagree(
    mode: Mode, engine_ratio: float, weight: float
) -> None:
    tokens = one_token(1.0, 3.0, rollout_logprobs=-1.0 - math.log(engine_ratio))
    loss, metrics = tokens.loss(algorithm_of(mode))
    assert loss.item() == pytest.approx(-3.0 * weight, rel=1e-5)
    assert metrics.maxima["logprob_diff_max"].item() == pytest.approx(abs(math.log(engine_ratio)), rel=1e-5)
    assert metrics.maxima["importance_weight_max"].item() == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize(("reference", "kl"), [(-1.0, 0.0), (-2.0, math.exp(-1)), (0.0, math.e - 2)])
def test_kl_and_entropy_enter_with_their_coefficients(reference: float, kl: float) -> None:
    tokens = one_token(1.0, 0.0, reference_logprobs=reference)
    tokens = replace(tokens, entropy=torch.tensor([0.7], requires_grad=True))
    loss, metrics = tokens.loss(algorithm_of(kl_coefficient=0.5, entropy_coefficient=0.1))
    assert loss.item() == pytest.approx(0.5 * kl - 0.1 * 0.7, rel=1e-5)
    assert metrics.sums["kl"].item() == pytest.approx(kl, rel=1e-5)
    assert not any(value.requires_grad for value in (metrics.sums | metrics.maxima).values()), "the graph is kept"
