"""Parameters and gradients fit; the state of AdamW, or the temporary memory of its step, does not."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import GIB, floats, take_card
from rljob_testing.induced_failures.catalogue import induces


def parameters_with_gradients(size_gib: int) -> list[nn.Parameter]:
    """Float32 parameters of 1 GiB each, with gradients, as after a backward pass."""
    parameters = [nn.Parameter(floats(GIB)) for _ in range(size_gib)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters


@induces(FailureClass.OPTIMIZER_STATE)
def state_of_the_first_step(folder: Path) -> None:
    """Two moments per parameter are allocated in the first step: four times the parameters in all."""
    parameters = parameters_with_gradients(int(take_card().free_gib / 3.5))
    torch.optim.AdamW(parameters).step()


@induces(FailureClass.OPTIMIZER_STATE)
def temporary_copies_of_a_step(folder: Path) -> None:
    """The state fits; the square roots of all second moments at once (foreach implementation) do not."""
    parameters = parameters_with_gradients(int(take_card().free_gib / 4.6))
    torch.optim.AdamW(parameters, foreach=True).step()
