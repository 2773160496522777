"""The learning rate of a step follows from its number, and is that of transformers' schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from rljob_api.algorithm import AlgorithmSpec, LearningRateSchedule
from rljob_client.errors import BadInput
from rljob_trainer.algorithms.learning_rate import learning_rate_at

STEPS = 12


def algorithm(name: str, args: dict[str, Any], warmup_steps: int) -> AlgorithmSpec:
    schedule = LearningRateSchedule.model_validate({"name": name, "args": args})
    return AlgorithmSpec(steps=STEPS, learning_rate=1e-3, warmup_steps=warmup_steps, learning_rate_schedule=schedule)


@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 12])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_min_lr", {"min_lr": 2e-4}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
        ("inverse_sqrt", {}),
        ("warmup_stable_decay", {"num_decay_steps": 3}),
    ],
)
def test_rates_are_those_of_an_optimizer_that_steps_through_the_schedule(
    name: str, args: dict[str, Any], warmup_steps: int
) -> None:
    """Without the first step of a warm-up, whose rate would be 0."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    skipped = int(warmup_steps > 0)
    scheduler = get_scheduler(name, optimizer, warmup_steps, STEPS + skipped, args)
    stepped = []
    for _ in range(STEPS + skipped):
        stepped.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    settings = algorithm(name, args, warmup_steps)
    rates = [learning_rate_at(settings, step) for step in range(1, STEPS + 1)]
    assert rates == pytest.approx(stepped[skipped:], rel=1e-12)
    assert 0 < rates[0] <= max(rates) <= 1e-3 * (1 + 1e-12)
    assert rates == [learning_rate_at(settings, step) for step in reversed(range(1, STEPS + 1))][::-1]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("cosine", {"min_lr": 0.1}, "unexpected keyword argument 'min_lr'"),
        ("cosine_with_min_lr", {}, "min_lr"),
        ("warmup_stable_decay", {}, "num_decay_steps"),
        ("polynomial", {"lr_end": 1.0}, "lr_end"),
        ("cosine_with_restarts", {"num_cycles": "two"}, "num_cycles|str|float"),
    ],
)
def test_arguments_that_a_schedule_does_not_accept_are_refused(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=f"learningRateSchedule.args: expected .* {name} of transformers.*({message})"):
        learning_rate_at(algorithm(name, args, 0), STEPS)
