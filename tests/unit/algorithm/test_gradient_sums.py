"""Gradients of bfloat16 matrices are added to their float32 sums unrounded, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from rljob_trainer.algorithm.gradient_sums import sum_matrices
from rljob_trainer.algorithm.logprobs import chunked_logprobs
from rljob_trainer.policy.gradients import Gradients

WIDTH, VOCABULARY, PADDING = 16, 40, 3


class GatedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.down(nn.functional.silu(self.up(self.norm(hidden))))
        return output


class TiedModel(nn.Module):
    """Its output projection is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.layers = nn.ModuleList(GatedLayer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logprobs, _ = chunked_logprobs(
            hidden[0], self.embedding.weight, ids[0].roll(1), temperature=1.0, chunk_tokens=9
        )
        return logprobs.mean()


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def model_of(dtype: torch.dtype) -> TiedModel:
    torch.manual_seed(0)
    return TiedModel().to(torch.bfloat16).to(dtype)


def gradients_of(model: TiedModel, micro_batches: int = 8) -> Gradients:
    gradients = Gradients(list(model.parameters()))
    for number in range(micro_batches):
        ids = torch.randint(0, VOCABULARY, (1, 30 + number), generator=torch.Generator().manual_seed(number))
        with gradients.added_up():
            model(ids).backward()
    return gradients


def error_of(found: Gradients, exact: Gradients, number: int) -> float:
    ours, theirs = found.of(number), exact.of(number)
    assert ours is not None
    assert theirs is not None
    assert ours.dtype == torch.float32
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_are_closer_to_exact_ones_than_those_of_autograd(compiled: bool) -> None:
    summed, plain, exact = (model_of(dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32))
    sum_matrices(summed)
    if compiled:
        for layer in summed.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend="aot_eager")
    found, rounded, expected = (gradients_of(each) for each in (summed, plain, exact))
    names = [name for name, _ in summed.named_parameters()]
    errors = {
        name: [error_of(each, expected, number) for each in (found, rounded)] for number, name in enumerate(names)
    }
    assert all(ours <= 1.1 * theirs < 0.03 for ours, theirs in errors.values()), errors
    of_products = [error for name, error in errors.items() if "up.weight" in name or "down" in name]
    assert sum(ours for ours, _ in of_products) < sum(theirs for _, theirs in of_products)
    # Nothing is left for autograd: of the embedding, which is the head as well, and of the linear layers.
    assert all(each.grad is None for each in summed.parameters())


def test_the_padding_token_learns_only_from_the_head() -> None:
    model = model_of(torch.bfloat16)
    sum_matrices(model)
    gradients = Gradients(list(model.parameters()))
    with gradients.added_up():
        model.embedding(torch.tensor([[PADDING, 5, 5]])).sum().backward()
    total = gradients.of(0)
    assert total is not None
    assert total.view(VOCABULARY, WIDTH).sum(1).nonzero().tolist() == [[5]]
    assert float(total.sum()) == 2 * WIDTH


def test_dropped_gradients_leave_no_sums() -> None:
    model = model_of(torch.bfloat16)
    sum_matrices(model)
    gradients = Gradients(list(model.parameters()))
    with gradients.dropped(), gradients.added_up():
        model(torch.arange(20)[None]).backward()
    assert gradients.all() == []


def test_a_backward_pass_that_would_lose_gradients_is_an_error() -> None:
    model = model_of(torch.bfloat16)
    sum_matrices(model)
    with pytest.raises(RuntimeError, match=r"expected a sum for the gradient of a matrix of shape \[16, 32\]"):
        model(torch.arange(20)[None]).backward()


def test_float32_and_frozen_matrices_are_left_to_autograd() -> None:
    trained, frozen = model_of(torch.float32), model_of(torch.bfloat16).requires_grad_(False)
    for model in (trained, frozen):
        sum_matrices(model)
        assert type(model.embedding) is nn.Embedding
        assert {type(each.up) for each in model.layers} == {nn.Linear}
