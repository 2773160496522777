from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_trainer.algorithm.logprobs import chunked_logprobs

TOKENS, HIDDEN, VOCABULARY = 23, 8, 50


def inputs(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (tokens,), generator=generator)


def whole_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    distribution = torch.log_softmax((hidden @ weight.T).float() / temperature, -1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS, 1000])
@pytest.mark.parametrize("uses", ["logprobs", "entropy", "both"])
def test_values_and_gradients_are_those_of_the_whole_logits(chunk_tokens: int, uses: str) -> None:
    coefficients = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))

    def objective(logprobs: Tensor, entropy: Tensor) -> Tensor:
        parts = {"logprobs": [logprobs @ coefficients[0]], "entropy": [entropy @ coefficients[1]]}
        return torch.stack(parts.get(uses) or [*parts["logprobs"], *parts["entropy"]]).sum()

    expected_hidden, expected_weight, targets = inputs()
    expected = whole_logprobs(expected_hidden, expected_weight, targets, 0.7)
    objective(*expected).backward()
    hidden, weight, _ = inputs()
    found = chunked_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=chunk_tokens)
    objective(*found).backward()

    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(hidden.grad, expected_hidden.grad)
    torch.testing.assert_close(weight.grad, expected_weight.grad)


def test_bfloat16_inputs_get_float32_logits_and_bfloat16_gradients() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=4)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16

    exact_hidden, exact_weight = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    exact = whole_logprobs(exact_hidden, exact_weight, targets, 1.0)[0]
    exact.sum().backward()
    torch.testing.assert_close(logprobs, exact)  # not rounded to 16 bits before the softmax
    torch.testing.assert_close(weight.grad.float(), exact_weight.grad, atol=0.1, rtol=0.05)


def test_without_tokens_all_gradients_are_zero() -> None:
    hidden, weight, targets = inputs(tokens=0)
    logprobs, _ = chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=4)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not weight.grad.any()


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    hidden, weight, targets = inputs()
    with _LargestTensor() as largest:
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=10)
        (logprobs + entropy).sum().backward()
    assert largest.elements <= 10 * VOCABULARY


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_it() -> None:
    hidden, weight, targets = inputs()
    logprobs, _ = chunked_logprobs(hidden, weight.requires_grad_(False), targets, temperature=1.0, chunk_tokens=2)
    with _LargestTensor(except_for=weight) as largest:
        logprobs.sum().backward()
    assert largest.elements < VOCABULARY * HIDDEN
    frozen_grad, hidden = hidden.grad, hidden.detach().requires_grad_()
    chunked_logprobs(hidden, weight.requires_grad_(), targets, temperature=1.0, chunk_tokens=2)[0].sum().backward()
    assert frozen_grad is not None
    torch.testing.assert_close(hidden.grad, frozen_grad)


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returned, except views of `except_for`."""

    def __init__(self, except_for: Tensor | None = None) -> None:
        super().__init__()
        self.elements = 0
        self._known = None if except_for is None else except_for.data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.data_ptr() != self._known:
                self.elements = max(self.elements, tensor.numel())
        return result
