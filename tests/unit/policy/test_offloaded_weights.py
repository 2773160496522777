"""Weights that cannot leave the device, or not come back, are all where they were, and the next try succeeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rljob_client.errors import BadInput
from rljob_trainer.policy.host_array import HostArray
from rljob_trainer.policy.memory_mitigations import policy_offload
from rljob_trainer.policy.memory_mitigations.policy_offload import PolicyOffload

CPU = torch.device("cpu")


class Model(nn.Module):
    """Trained weights in two types, one of them a view that begins within its memory, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        memory = torch.randn(7, 5, generator=draw)
        self.trained = nn.Parameter(memory[2:5])
        self.other = nn.Parameter(torch.randn(301, generator=draw).bfloat16())
        self.frozen = nn.Parameter(torch.randn(9, 3, generator=draw), requires_grad=False)


def values(model: nn.Module) -> dict[str, bytes]:
    return {name: each.detach().view(-1).view(torch.uint8).clone().numpy().tobytes() for name, each in named(model)}


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters()]


def bytes_on_device(model: nn.Module) -> int:
    return sum(each.untyped_storage().nbytes() for _, each in named(model))


def test_copies_are_the_trained_shards_while_the_weights_are_away() -> None:
    model = Model()
    expected, trained = values(model), {name: each.detach().clone() for name, each in named(model)}
    offload = PolicyOffload([model], CPU)
    for _ in range(2):
        offload.offload()
        assert bytes_on_device(model) == 0
        assert offload.copies.keys() == {"trained", "other"}
        assert all(torch.equal(copy, trained[name]) for name, copy in offload.copies.items())
        offload.bring_back()
        assert values(model) == expected
        assert not offload.copies


@pytest.mark.parametrize("refused", [0, 1], ids=["trained", "frozen"])
def test_weights_stay_if_the_host_has_no_memory_for_them(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    model, arrays = Model(), []

    class Refusing(HostArray):
        def __init__(self, elements: int, dtype: torch.dtype, **settings: Any) -> None:
            super().__init__(elements, dtype, **settings)
            arrays.append(self)

        @property
        def tensor(self) -> torch.Tensor:
            if arrays.index(self) == refused:
                raise RuntimeError("expected 15.3 GiB of host memory for the policy's weights")
            return super().tensor

    monkeypatch.setattr(policy_offload, "HostArray", Refusing)
    expected, offload = values(model), PolicyOffload([model], CPU)
    with pytest.raises(RuntimeError, match="host memory for the policy's weights"):
        offload.offload()
    assert not offload.offloaded
    assert not offload.copies
    assert values(model) == expected
    offload.offload()
    assert bytes_on_device(model) == 0
    offload.bring_back()
    assert values(model) == expected


def test_weights_stay_away_if_their_files_cannot_be_read() -> None:
    model = Model()
    expected, frozen = values(model), model.frozen.detach().clone()
    failures = [BadInput("cannot read model.safetensors: it ends too early; copy the file again")]

    def read() -> None:
        assert model.frozen.untyped_storage().nbytes()
        if failures:
            raise failures.pop()
        model.frozen.data.copy_(frozen)

    offload = PolicyOffload([model], CPU, read)
    offload.offload()
    with pytest.raises(BadInput):
        offload.bring_back()
    assert offload.offloaded
    assert bytes_on_device(model) == 0
    assert offload.copies.keys() == {"trained", "other"}, "a checkpoint reads them"
    offload.bring_back()
    assert values(model) == expected
