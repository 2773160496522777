"""A tensor kept for logging, or for later, keeps the graph that computed it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import memory_log_of, take_card
from rljob_testing.induced_failures.catalogue import induces
from rljob_testing.induced_failures.programs.activation_spike import HIDDEN, VOCABULARY, tokens_for
from rljob_trainer.telemetry.memory import MemoryLog

UNTIL_FULL = 20
"""Number of micro-batches, or steps, whose graphs fill the GPU."""


@induces(FailureClass.RETAINED_GRAPH)
def entropy_kept_of_each_micro_batch(folder: Path) -> None:
    """The entropy is not part of the loss, so no backward pass frees its saved tensors."""
    tokens = tokens_for(take_card().free_bytes, bytes_per_logit=4 + 4, share=1 / UNTIL_FULL)
    lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False, device="cuda")
    memory, entropies = MemoryLog(memory_log_of(folder), "cuda"), []
    for micro_batch in range(4 * UNTIL_FULL):
        logprobs = lm_head(torch.randn(tokens, HIDDEN, device="cuda")).log_softmax(-1)
        entropies.append(-(logprobs.exp() * logprobs).sum(-1).mean())
        logprobs[:, 0].mean().neg().backward()
        memory.record(1, "update", micro_batch)


@induces(FailureClass.RETAINED_GRAPH)
def values_kept_of_each_step(folder: Path) -> None:
    """A moving average of a critic's values over steps, computed from tensors with a graph."""
    width, layers = 4096, 8
    tokens = int(take_card().free_bytes / UNTIL_FULL) // (layers * 2 * width * 2)
    critic = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
    critic.to("cuda", torch.bfloat16)
    memory, average = MemoryLog(memory_log_of(folder), "cuda"), torch.zeros((), device="cuda")
    for step in range(1, 4 * UNTIL_FULL):
        values = critic(torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16))
        average = 0.9 * average + 0.1 * values.float().mean()
        memory.record(step, "update")
