"""Failures of one process that trains: activations, graphs, states, copies, weights, fragments, a limit."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import GIB, floats, gib, memory_log_of, take_card
from rljob_testing.induced_failures.catalogue import induces
from rljob_trainer.telemetry.memory import MemoryLog

# One pass through the model needs more memory than is left: logits over a large vocabulary, attention over a long
# text.


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


# A tensor kept for logging, or for later, keeps the graph that computed it.


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


# Parameters and gradients fit; the state of AdamW, or the temporary memory of its step, does not.


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


# The engine gets its weights as full copies, which do not fit beside the policy.


def policy_of(size_gib: int) -> dict[str, Tensor]:
    """Float32 weights of a policy, 1 GiB each, by name."""
    return {f"layers.{layer}.weight": floats(GIB) for layer in range(size_gib)}


def sync_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All weights in the engine's precision, at once."""
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


def broadcast_to_engine(weights: dict[str, Tensor]) -> Tensor:
    """All weights in one packed tensor."""
    return torch.cat([weight.flatten() for weight in weights.values()])


@induces(FailureClass.WEIGHT_SYNC_SPIKE)
def copies_in_the_engines_precision(folder: Path) -> None:
    """Weights and two moments fit; another half of the weights does not."""
    size_gib = int(take_card().free_gib / 3.25)
    weights = policy_of(size_gib)
    moments = [floats(GIB) for _ in range(2 * size_gib)]
    sync_weights(weights)
    del moments


@induces(FailureClass.WEIGHT_SYNC_SPIKE)
def one_packed_tensor(folder: Path) -> None:
    """Weights and two moments fit; the weights a second time, in one piece, do not."""
    size_gib = int(take_card().free_gib / 3.5)
    weights = policy_of(size_gib)
    moments = [floats(GIB) for _ in range(2 * size_gib)]
    broadcast_to_engine(weights)
    del moments


# The weights of a model alone are larger than the GPU.


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


# Enough memory is reserved and free, but in pieces that are too small: classic segments and varying lengths.


LONGEST_GIB = 8
CLASSIC_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}


@induces(FailureClass.FRAGMENTATION, variables=CLASSIC_SEGMENTS)
def results_kept_between_batches(folder: Path) -> None:
    """No segment can be freed, and none holds the longest batch.

    The first batches are the longest and leave large segments in the cache. Each later batch splits a segment, and its
    result, which is kept, lies in the other part.
    """
    batches = int(take_card().free_gib // LONGEST_GIB)
    longest = [gib(LONGEST_GIB) for _ in range(batches)]
    del longest
    results = []
    for batch in range(batches):
        activations = gib(5 + batch / batches)
        results.append(gib(1.6))
        del activations
    longest = [gib(LONGEST_GIB) for _ in range(batches)]
    del longest


@induces(FailureClass.FRAGMENTATION, variables=CLASSIC_SEGMENTS)
def caches_grown_by_concatenation(folder: Path) -> None:
    """Conversations of random length, each with a cache that is copied into a larger one as it grows."""
    conversations = int(take_card().free_gib * 28 / 139)
    lengths = random.Random(0)
    caches: dict[int, torch.Tensor] = {}
    for _ in range(300_000):
        conversation = lengths.randrange(conversations)
        cache = caches.pop(conversation, None)
        size_gib = 0.0 if cache is None else cache.numel() / 2**30
        if size_gib <= lengths.uniform(4, 9):
            caches[conversation] = gib(size_gib + lengths.uniform(0.1, 0.6))


# The process may use a part of the GPU, and reaches that limit while the rest of the GPU is free.


_FRACTION = 0.3


@induces(FailureClass.GPU_MEMORY_LIMIT)
def a_fraction_set_by_the_program(folder: Path) -> None:
    """`set_per_process_memory_fraction`, as a service does that shares the GPU with others."""
    card = take_card()
    torch.cuda.set_per_process_memory_fraction(_FRACTION)
    _fill(card.total_bytes)


@induces(
    FailureClass.GPU_MEMORY_LIMIT, variables={"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{_FRACTION}"}
)
def a_fraction_set_in_the_environment(folder: Path) -> None:
    """The same limit, from the variable that torch 2.10 and newer read."""
    _fill(take_card().total_bytes)


def _fill(total_bytes: int) -> None:
    """Allocate tensors of 1 GiB until one fails, or the limit turns out not to be in force."""
    kept = [floats(GIB) for _ in range(int(total_bytes * (_FRACTION + 0.1) / GIB))]
    raise AssertionError(f"{len(kept)} GiB were allocated: the limit is not in force")
