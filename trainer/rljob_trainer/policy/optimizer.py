"""The optimizer, and the place of its state: on the GPU or in host memory (`optimizer_offload`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.model import PolicyModel


def adamw(model: PolicyModel, config: PolicyConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameters, as one fused kernel.

    Its moments are allocated now rather than in the first step: a shortage of memory then shows at the start, and a
    checkpoint always contains them. With `optimizer_offload` they are allocated in host memory.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )
    for parameter in model.parameters():
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        if config.memory.optimizer_offload:
            state = {name: value.cpu() for name, value in state.items()}
        optimizer.state[parameter] = state
    return optimizer


@contextmanager
def optimizer_on_device(optimizer: torch.optim.Optimizer, device: torch.device, *, offload: bool) -> Iterator[None]:
    """Keep the optimizer state on `device` within the block; outside in host memory, if `offload`."""
    if not offload:
        yield
        return
    try:
        move_optimizer_state(optimizer, device)
        yield
    finally:
        move_optimizer_state(optimizer, torch.device("cpu"))


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to(device)
