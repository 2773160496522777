"""One pass through the model needs more memory than is left: logits over a large vocabulary, attention over a long
text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import take_card
from rljob_testing.induced_failures.catalogue import induces

VOCABULARY = 151_936
HIDDEN = 1024
HEADS = 16


def tokens_for(free_bytes: int, bytes_per_logit: int, share: float) -> int:
    """The number of tokens whose logits, at `bytes_per_logit` each, fill `share` of the free memory."""
    return int(share * free_bytes) // (bytes_per_logit * VOCABULARY)


def compute_logprobs(hidden: Tensor, lm_head: nn.Linear, targets: Tensor) -> Tensor:
    """Log-probabilities of `targets` [tokens] after `hidden` [tokens, hidden]."""
    logits: Tensor = lm_head(hidden).float()
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


class Attention(nn.Module):
    """Attention that materializes its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` and the result: [tokens, hidden]."""
        query, key, value = self.projection(hidden).unflatten(-1, (HEADS, -1)).transpose(0, 1).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2)
        weights = (scores / (HIDDEN // HEADS) ** 0.5).softmax(-1)
        mixed: Tensor = weights @ value
        return mixed.transpose(0, 1).flatten(1)


@induces(FailureClass.ACTIVATION_SPIKE)
def logprobs_of_a_large_batch(folder: Path) -> None:
    """The logits fit, even twice (bfloat16 and float32); their log-softmax beside them does not."""
    tokens = tokens_for(take_card().free_bytes, bytes_per_logit=2 + 4, share=0.85)
    lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    targets = torch.zeros(tokens, device="cuda", dtype=torch.long)
    logprobs = compute_logprobs(hidden, lm_head, targets)
    logprobs.sum().backward()


@induces(FailureClass.ACTIVATION_SPIKE)
def attention_over_a_long_text(folder: Path) -> None:
    """The matrix [heads, tokens, tokens] fits once, not twice."""
    tokens = int((0.6 * take_card().free_bytes / (2 * HEADS)) ** 0.5)
    attention = Attention().to("cuda", torch.bfloat16)
    mixed = attention(torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16))
    mixed.sum().backward()


@induces(FailureClass.ACTIVATION_SPIKE)
def gradient_of_a_large_loss(folder: Path) -> None:
    """The forward pass fits; the gradients of the logits beside its saved tensors do not."""
    tokens = tokens_for(take_card().free_bytes, bytes_per_logit=2 + 4 + 4, share=0.85)
    lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    scores = lm_head(hidden)
    loss = functional.cross_entropy(scores.float(), torch.zeros(tokens, device="cuda", dtype=torch.long))
    loss.backward()
