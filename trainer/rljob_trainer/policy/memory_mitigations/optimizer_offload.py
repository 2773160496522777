"""`optimizer_offload`: the optimizer's state is on the GPU only while it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def optimizer_on_device(optimizer: torch.optim.Optimizer, device: torch.device, *, offload: bool) -> Iterator[None]:
    """Within, the optimizer's state is on `device`; outside it is in host memory, where `offload`."""
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
