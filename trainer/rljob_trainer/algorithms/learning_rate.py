"""The learning rate of a step: a pure function, so that a resumed run has the same rates."""

from __future__ import annotations

from rljob_api.algorithm import AlgorithmSpec
from rljob_client.errors import BadInput


def learning_rate_at(algorithm: AlgorithmSpec, step: int) -> float:
    """The learning rate of `step`, counted from 1. Imports torch, unless the schedule is constant.

    The rates are those of transformers' `get_scheduler`, without the first one of a warm-up, which is 0. Raises
    `BadInput` if the schedule refuses its arguments.
    """
    schedule, warmup = algorithm.learning_rate_schedule, algorithm.warmup_steps
    if schedule.name == "constant":
        return algorithm.learning_rate * min(1.0, step / max(warmup, 1))
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=algorithm.learning_rate)
    skipped = int(warmup > 0)
    try:
        scheduler = get_scheduler(schedule.name, optimizer, warmup, algorithm.steps + skipped, dict(schedule.args))
        return algorithm.learning_rate * float(scheduler.lr_lambdas[0](step - 1 + skipped))
    except (TypeError, ValueError, ArithmeticError, AssertionError) as error:
        raise BadInput(
            f"algorithm.learningRateSchedule.args: expected arguments that the schedule {schedule.name} of "
            f"transformers accepts, found {schedule.args}: {error}; correct them"
        ) from error
