"""Linear layers that are rounded to 8 bits."""

from __future__ import annotations

import torch

from bench.programs.rounding_to_8_bits import RoundedLinear, round_linear_layers, rounded


def test_rounding_keeps_the_largest_value_and_changes_the_others_little() -> None:
    values = torch.tensor([3.0, -1.7, 0.31, 0.0])
    found = rounded(values)
    assert found[0] == 3.0
    assert (found - values).abs().max() <= 1.7 / 16
    assert not found.equal(values)


def test_all_linear_layers_but_the_output_layer_are_rounded() -> None:
    inner, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model = torch.nn.ModuleDict({"layers": torch.nn.Sequential(inner), "lm_head": head})
    round_linear_layers(model)
    found = model.get_submodule("layers.0")
    assert isinstance(found, RoundedLinear)
    assert found.weight.equal(rounded(inner.weight.detach()))
    assert model.get_submodule("lm_head") is head
