"""A model with hardly anything but activations, for programs in which another process is the cause."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 8192
LAYERS = 8


def train(activation_bytes: int, steps: int = 1) -> nn.Module:
    """Forward and backward passes with `activation_bytes` at their peak; returns the model."""
    layers = [nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    tokens = activation_bytes // ((LAYERS + 1) * WIDTH * 2)
    for _ in range(steps):
        values = model(torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16))
        values.sum().backward()
        model.zero_grad(set_to_none=True)
    return model
