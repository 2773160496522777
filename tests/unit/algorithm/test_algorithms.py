"""Each algorithm: its loss by hand, and a whole step against loops over sequences, however the step is divided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rljob_api.algorithm import AlgorithmSpec, ImportanceSamplingSpec
from rljob_api.algorithms import ALGORITHMS, AlgorithmName, AlgorithmSettings
from rljob_trainer.algorithm.micro_batch import MicroBatch, completions_with_tokens, micro_batches_of, with_gradient
from rljob_trainer.algorithms import losses
from rljob_trainer.algorithms.objective import LossMetrics, policy_loss, with_effective_sample_size
from rljob_trainer.algorithms.tokens import LossFunction, Tokens
from rljob_trainer.rollout_batch import FloatArray, RolloutBatch

MAX_TOKENS = 12


def loss_of(name: AlgorithmName) -> LossFunction:
    function: LossFunction = getattr(losses, ALGORITHMS[name].loss)
    return function


def one_response(log_ratios: list[float], advantage: float) -> Tokens:
    old = torch.full((len(log_ratios),), -1.0)
    return Tokens(
        logprobs=(old + torch.tensor(log_ratios)).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.full_like(old, advantage),
        kept=torch.ones_like(old, dtype=torch.bool),
        sequence=torch.zeros_like(old, dtype=torch.int64),
        lengths=[len(log_ratios)],
    )


@pytest.mark.parametrize(
    ("name", "log_ratios", "advantage", "loss", "gradient"),
    [
        ("dapo", [math.log(1.5)], 2.0, [-2 * 1.28], [0.0]),
        ("dapo", [math.log(4.0)], -2.0, [8.0], [8.0]),  # without dual clip
        ("dr_grpo", [math.log(1.5)], 2.0, [-2 * 1.2], [0.0]),
        ("gspo", [2e-4, 4e-4], 1.0, [-math.exp(3e-4)] * 2, [-math.exp(3e-4)] * 2),
        ("gspo", [2e-4, 8e-4], 1.0, [-1.0004] * 2, [0.0] * 2),  # the response is clipped, not the second token alone
        ("gspo", [-8e-4, 0.0], -1.0, [1 - 3e-4] * 2, [0.0] * 2),
        ("cispo", [math.log(8.0), math.log(2.0)], 1.0, [-5 * (math.log(8) - 1), -2 * (math.log(2) - 1)], [-5.0, -2.0]),
        ("cispo", [math.log(0.1)], -3.0, [0.3 * (math.log(0.1) - 1)], [0.3]),  # no lower clip
        ("rloo", [0.0, 0.0], 2.0, [-2.0, -2.0], [-2.0, -2.0]),
        ("reinforce_plus_plus", [math.log(0.5)], -1.0, [0.8], [0.0]),
    ],
)
def test_the_loss_of_a_response_is_that_of_the_paper(
    name: AlgorithmName, log_ratios: list[float], advantage: float, loss: list[float], gradient: list[float]
) -> None:
    tokens = one_response(log_ratios, advantage)
    found = loss_of(name)(tokens, ALGORITHMS[name].defaults)
    assert isinstance(found, tuple)
    found[0].sum().backward()
    assert tokens.logprobs.grad is not None
    assert found[0].tolist() == pytest.approx(loss, rel=1e-6)
    assert tokens.logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-5)


@dataclass
class Step:
    """A scored batch, and log-probabilities by completion, [tokens] each."""

    batch: RolloutBatch
    new: list[FloatArray]
    old: list[FloatArray]
    completions: list[int]
    reference: list[FloatArray]
    entropy: list[FloatArray]

    @classmethod
    def random(cls, seed: int, spread: float) -> Step:
        """Twelve responses of 0 to 9 tokens in three groups; one is masked, and one token of another is dropped."""
        draw = np.random.default_rng(seed)
        lengths = draw.integers(0, 10, 12)
        lengths[[3, 7]] = 5
        old, new, engine = [], [], []
        for length in lengths:
            old.append(draw.normal(-2, 0.5, length).astype(np.float32))
            new.append((old[-1] + draw.normal(0, spread, length)).astype(np.float32))
            engine.append((old[-1] + draw.normal(0, 0.3, length)).astype(np.float32))
        engine[7][2] = -np.inf
        kept = np.ones(12, np.bool_)
        kept[3] = False
        batch = RolloutBatch(
            step=1,
            group_size=4,
            prompt_ids=[np.ones(3, np.int32)] * 3,
            response_ids=[np.ones(length, np.int32) for length in lengths],
            rollout_logprobs=engine,
            finished=np.ones(12, np.bool_),
            kept=kept,
        ).scored(np.zeros(12, np.float32), draw.normal(size=12).astype(np.float32) * kept)
        reference = [(each + draw.normal(0, 0.3, len(each))).astype(np.float32) for each in old]
        entropy = [draw.uniform(0, 2, len(each)).astype(np.float32) for each in old]
        return cls(batch, new, old, completions_with_tokens(batch), reference, entropy)

    def parts(self, algorithm: AlgorithmSpec, ranks: int, budget: int) -> Iterator[MicroBatch]:
        for rank in range(ranks):
            yield from micro_batches_of(
                self.batch,
                self.completions,
                rank=rank,
                ranks=ranks,
                budget_tokens=budget,
                algorithm=algorithm,
            )


def divided(step: Step, algorithm: AlgorithmSpec, ranks: int, budget: int) -> tuple[float, list[Any], dict[str, float]]:
    """Loss, gradient by completion, and metrics over all micro-batches of all ranks."""
    new = [torch.tensor(values, requires_grad=True) for values in step.new]
    total, sums, maxima = 0.0, dict[str, float](), dict[str, float]()

    def joined(values: list[Any], part: MicroBatch) -> Tensor:
        return torch.cat([torch.as_tensor(values[i]) for i in part.completions]) if part.completions else torch.zeros(0)

    for part in step.parts(algorithm, ranks, budget):
        found: tuple[Tensor, LossMetrics] = policy_loss(
            part,
            joined(new, part),
            joined(step.entropy, part),
            algorithm,
            loss_of(algorithm.name),
            old_logprobs=joined(step.old, part),
            reference_logprobs=joined(step.reference, part) if algorithm.kl_coefficient else None,
        )
        if part.completions:
            found[0].backward()
        total += found[0].item()
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in found[1].sums.items()}
        maxima = {name: max(maxima.get(name, 0.0), float(value)) for name, value in found[1].maxima.items()}
    gradient = [None if values.grad is None else values.grad.numpy() for values in new]
    return total, gradient, with_effective_sample_size(sums) | maxima


def loops(step: Step, algorithm: AlgorithmSpec, new: list[Any], weights_at: list[Any]) -> float:
    """The loss by loops over sequences in float64. `weights_at`: new log-probabilities of weights without gradient."""
    settings: AlgorithmSettings = algorithm.settings
    sampling = algorithm.importance_sampling
    kept = {i: np.isfinite(step.batch.rollout_logprobs[i]) for i in step.completions}
    tokens = sum(int(mask.sum()) for mask in kept.values())
    total = 0.0
    for i, mask in kept.items():
        log_ratio = np.asarray(new[i], np.float64)[mask] - step.old[i][mask]
        advantage = float(step.batch.advantages[i])
        if algorithm.name == "gspo":
            log_ratio = np.full_like(log_ratio, log_ratio.mean())
        ratio = np.exp(log_ratio)
        if algorithm.name == "cispo":
            frozen = np.exp(np.asarray(weights_at[i], np.float64)[mask] - step.old[i][mask])
            objective = np.minimum(frozen, 1 + settings.clip_high) * advantage * np.asarray(new[i], np.float64)[mask]
        else:
            clipped = np.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
            objective = np.minimum(ratio * advantage, clipped * advantage)
            if advantage < 0 and settings.dual_clip:
                objective = np.maximum(objective, settings.dual_clip * advantage)
        trust = np.exp(step.old[i][mask].astype(np.float64) - step.batch.rollout_logprobs[i][mask])
        if sampling.level == "Sequence":
            trust = np.full_like(trust, trust.prod())
        if sampling.mode == "Truncate":
            trust = np.minimum(trust, sampling.cap)
        elif sampling.mode == "Mask":
            trust = trust * ((trust >= 1 / sampling.cap) & (trust <= sampling.cap))
        else:
            trust = np.ones_like(trust)
        beyond = step.reference[i][mask] - np.asarray(new[i], np.float64)[mask]
        penalty = algorithm.kl_coefficient * (np.exp(beyond) - beyond - 1)
        summed = float((trust * objective - penalty + algorithm.entropy_coefficient * step.entropy[i][mask]).sum())
        total -= {
            "TokenMean": summed / tokens,
            "SequenceMean": summed / mask.sum() / len(kept),
            "ConstantLength": summed / (len(kept) * algorithm.max_response_tokens),
        }[settings.loss_aggregation]
    return total


CASES = [
    *((name, {}, ImportanceSamplingSpec(mode="Disabled")) for name in ALGORITHMS),
    ("grpo", {"loss_aggregation": "SequenceMean"}, ImportanceSamplingSpec()),
    ("gspo", {"loss_aggregation": "TokenMean"}, ImportanceSamplingSpec(mode="Mask")),
    ("grpo", {"dual_clip": 1.2, "kl_coefficient": 0.4, "entropy_coefficient": 0.3}, ImportanceSamplingSpec(cap=1.2)),
    ("dapo", {}, ImportanceSamplingSpec(level="Sequence")),
    ("cispo", {"clip_high": 0.1}, ImportanceSamplingSpec(level="Sequence", mode="Mask")),
]


@pytest.mark.parametrize(("name", "settings", "sampling"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_step_is_that_of_loops_over_sequences_however_it_is_divided(
    name: AlgorithmName, settings: dict[str, Any], sampling: ImportanceSamplingSpec, seed: int
) -> None:
    algorithm = AlgorithmSpec(
        steps=1, name=name, importance_sampling=sampling, max_response_tokens=MAX_TOKENS, **settings
    )
    step = Step.random(seed, spread=4e-4 if name == "gspo" else 0.3)
    whole, gradient, metrics = divided(step, algorithm, ranks=1, budget=1000)
    assert whole == pytest.approx(loops(step, algorithm, step.new, step.new), rel=1e-4, abs=1e-6)
    assert gradient[3] is None, "the response is masked"
    for i in step.completions:
        for token in range(len(step.new[i])):
            ends = []
            for change in (1e-6, -1e-6):
                moved = [np.asarray(values, np.float64) for values in step.new]
                moved[i][token] += change
                ends.append(loops(step, algorithm, moved, step.new))
            assert gradient[i][token] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-2, abs=1e-5)
    assert 0 < metrics["importance_ess"] <= 1 + 1e-6
    for ranks, budget in ((1, 20), (2, 30), (3, 1)):
        loss, parts, sums = divided(step, algorithm, ranks, budget)
        assert loss == pytest.approx(whole, rel=1e-5, abs=1e-7)
        assert sums == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for one, other in zip(gradient, parts, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)


def ess_of(weights: list[float], **sampling: Any) -> dict[str, float]:
    """Metrics of a step with two responses of one and two tokens, whose engine ratios are `weights`."""
    step = Step.random(0, 0.0)
    logprobs = [np.asarray([-1 - math.log(each) for each in part], np.float32) for part in (weights[:1], weights[1:])]
    batch = replace(
        step.batch,
        group_size=2,
        prompt_ids=step.batch.prompt_ids[:1],
        response_ids=[np.ones(len(each), np.int32) for each in logprobs],
        rollout_logprobs=logprobs,
        finished=np.ones(2, np.bool_),
        advantages=np.ones(2, np.float32),
        kept=np.zeros(0, np.bool_),
    )
    old = [np.full(len(each), -1, np.float32) for each in logprobs]
    algorithm = AlgorithmSpec(steps=1, importance_sampling=ImportanceSamplingSpec(**sampling))
    return divided(Step(batch, old, old, [0, 1], old, old), algorithm, 2, 100)[2]


@pytest.mark.parametrize(
    ("sampling", "mean", "share"),
    [
        ({"cap": 100.0}, 4 / 3, 16 / (3 * 6)),  # (2 + 1 + 1)² / (3 · (4 + 1 + 1))
        ({"cap": 1.5, "mode": "Mask"}, 2 / 3, 4 / (3 * 2)),
        ({"mode": "Disabled"}, 1.0, 1.0),
    ],
)
def test_the_effective_sample_size_is_that_of_all_tokens(sampling: Any, mean: float, share: float) -> None:
    metrics = ess_of([2, 1, 1], **sampling)
    assert metrics["importance_weight_mean"] == pytest.approx(mean, rel=1e-5)
    assert metrics["importance_ess"] == pytest.approx(share, rel=1e-5)


def test_the_tokens_of_a_response_share_the_product_of_their_ratios() -> None:
    metrics = ess_of([2, 3, 0.5], level="Sequence", cap=10.0)
    assert metrics["importance_weight_mean"] == pytest.approx((2 + 1.5 + 1.5) / 3, rel=1e-5)
    assert ess_of([50, 50, 50], level="Sequence", mode="Mask")["importance_ess"] == 0, "all are masked"


def test_a_loss_of_the_user_gets_responses_without_advantage() -> None:
    step = Step.random(0, 0.1)
    batch = step.batch.scored(step.batch.rewards, 0 * step.batch.advantages)
    assert with_gradient(batch, step.completions, AlgorithmSpec(steps=1)) == step.completions[:1]
    assert with_gradient(batch, step.completions, AlgorithmSpec(steps=1, loss="own:loss")) == step.completions


def test_every_row_names_functions_that_exist() -> None:
    from rljob_trainer.algorithms import advantages

    for row in ALGORITHMS.values():
        assert callable(getattr(advantages, row.advantage))
        assert callable(getattr(losses, row.loss))
