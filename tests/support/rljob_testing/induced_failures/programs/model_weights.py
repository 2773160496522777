"""The weights of a model alone are larger than the GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import take_card
from rljob_testing.induced_failures.catalogue import induces

_WIDTH = 16_384
_LAYER_GIB = _WIDTH * _WIDTH * 4 / (1 << 30)


def layers(size_gib: float) -> list[nn.Linear]:
    """Layers of 1 GiB each, on the meta device, of at least `size_gib` in all."""
    return [nn.Linear(_WIDTH, _WIDTH, bias=False, device="meta") for _ in range(int(size_gib / _LAYER_GIB) + 1)]


@induces(FailureClass.MODEL_WEIGHTS)
def a_model_is_built_on_the_gpu(folder: Path) -> None:
    """Its layers are created on the GPU one by one, as an engine does before it loads their values."""
    model = nn.Sequential(*layers(1.2 * take_card().free_gib))
    model.to_empty(device="cuda")


@induces(FailureClass.MODEL_WEIGHTS)
def a_model_is_moved_to_the_gpu(folder: Path) -> None:
    """One layer in host memory is moved again and again, for a model that the host could not hold either."""
    count = len(layers(1.2 * take_card().free_gib))
    layer = nn.Linear(_WIDTH, _WIDTH, bias=False)
    model = [nn.Linear(_WIDTH, _WIDTH, bias=False, device="meta") for _ in range(count)]
    for part in model:
        part.weight = nn.Parameter(layer.weight.data)
        part.to(torch.device("cuda"))
