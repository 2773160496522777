"""Time of the phases of the longest step: a rough model, whose rates are fitted to measurements.

Within 20 % of the recorded jobs on H100s and H200s with 4B or more (tests/unit/memory/test_recorded_runs.py,
test_predicted_seconds.py). With smaller models the cores of the host decide, which differ more.
"""

from __future__ import annotations

from math import hypot

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget.gpu import (
    PolicyState,
    engine_sleeps,
    engine_weight_bytes,
    filled_tokens,
    kv_bytes_per_token,
    offloads_reference,
    sequences_in,
    sums_matrices,
)
from rljob_memory.budget.host import Copies
from rljob_memory.budget.lines import Phase
from rljob_memory.budget.setup import Setup
from rljob_memory.model_shape import ModelShape
from rljob_memory.workload import Workload

_ARITHMETIC_SHARE, _HALF_HIDDEN = 0.8, 1500
"""Share of a GPU's peak that the matrix products of an infinitely wide model reach in an update; half of it at this
hidden size."""

_ATTENTION_COST = 1.5
"""Time of an operation of attention, compared with one of a matrix product."""

_MEMORY_SHARE, _LINK_SHARE, _PCIE_SHARE = 0.8, 0.8, 0.625
"""Shares of the peak rates: of memory in decoding, of the links in FSDP2's collectives, and of PCIe in both directions
at once (40 GB/s each way, H200)."""

_NETWORK_RATE = 40e9
"""Bytes per second between machines: a network of 400 Gbit/s. Assumed."""

_DECODE_STEP_SECONDS, _DECODE_SEQUENCE_SECONDS, _DECODE_ALWAYS_SECONDS = 1.8e-3, 26e-6, 1e-3
"""Python on the host for each token: of the engine, of each of its sequences, and the part that no GPU work hides."""

_ALL_REDUCE_SECONDS, _ALL_REDUCE_SHARE = 2e-6, 0.127
"""An all-reduce between the GPUs of an engine, of which there are two in each layer: fixed seconds, and share of a
link's rate. vLLM's own kernels on two and four H200s (tensor_parallel_4.json: 8B, 14B; also 32B)."""

_SERVING_SHARE = 0.5
"""Share of a GPU's peak that the engine's matrix products reach."""
_MICRO_BATCH_SECONDS = 0.02
"""Kernel launches and Python of a micro-batch, apart from its arithmetic."""
_GRADIENT_PASSES, _SUMMED_GRADIENT_PASSES = 3, 1
"""Times that a micro-batch reads or writes the sum of gradients. If products add to it, they hide half of the two times
(H200: 34 µs more for a matrix of 50 million parameters)."""

LEAST_SAVING = 0.3
"""Share of an update's tokens that responses must save to share their prompt, because attention to a shared prompt is
a call of its own. With Qwen3-0.6B's shape on an H200, an update that saved 62 % of its tokens took 40 % less time, and
one that saved 18 % took 9 % more (shared_prompts.json). Wider models may gain earlier; they were not measured."""

_RELEASE_SECONDS = 0.07
"""An engine that sleeps and wakes up: a step took 71 ms less without (memory_mitigation_cost.json)."""

_SYNC_SECONDS, _SYNC_RATE, _GATHERED_SYNC_RATE = 0.05, 75e9, 65e9
"""Weight sync: fixed seconds, and bytes of weights per second from one rank and gathered from several."""

_FILE_RATE = 5e9
"""Weights from the model's files to a GPU, if the files are in the page cache or in memory. Assumed, not measured."""


def seconds_by_phase(setup: Setup, plan: MemoryPlan, copies: Copies) -> dict[Phase, float]:
    """Seconds of each phase if every sequence has the maximum length."""
    rollout = _rollout_seconds(setup, plan)
    if plan.policy_offload and engine_sleeps(setup.work, plan):
        rollout += _weight_copy_seconds(setup, plan, copies)
    sync_rate = _SYNC_RATE if setup.work.policy_ranks == 1 else _GATHERED_SYNC_RATE
    return {
        "rollout": rollout,
        "update": _update_seconds(setup, plan) + (_RELEASE_SECONDS if engine_sleeps(setup.work, plan) else 0),
        "sync": _SYNC_SECONDS + setup.model.weight_bytes / sync_rate,
    }


def _rollout_seconds(setup: Setup, plan: MemoryPlan) -> float:
    """Decoding takes the time of memory and arithmetic, or of the host with small models."""
    work, model, gpu = setup.work, setup.model, setup.hardware.gpu_type
    at_once = sequences_in(work, model, plan.kv_cache_bytes)
    context = work.max_prompt_tokens + work.max_response_tokens / 2
    read = decode_step_bytes(work, model, at_once, context)
    passes = 2 * model.parameters / work.tensor_parallel_size
    rate = gpu.bfloat16_flops * _SERVING_SHARE
    on_gpu = hypot(read / gpu.memory_rate / _MEMORY_SHARE, passes * at_once / rate)  # neither hides the other
    if work.tensor_parallel_size > 1:
        reduced = at_once * model.hidden * model.bytes_per_parameter
        each = _ALL_REDUCE_SECONDS + reduced / gpu.link_rate / _ALL_REDUCE_SHARE
        on_gpu += 2 * model.layers * each
    on_host = _DECODE_STEP_SECONDS + at_once * _DECODE_SEQUENCE_SECONDS
    waves = -(-work.sequences_of_an_engine // at_once)
    prompts = work.sequences_of_an_engine / work.group_size * work.max_prompt_tokens
    prefill = prompts * passes / rate
    return waves * work.max_response_tokens * (max(on_gpu, on_host) + _DECODE_ALWAYS_SECONDS) + prefill


def decode_step_bytes(work: Workload, model: ModelShape, sequences: int, context_tokens: float) -> float:
    """Bytes that an engine's GPU reads for one token of each sequence: its weights, keys and values."""
    return engine_weight_bytes(work, model) + sequences * context_tokens * kv_bytes_per_token(work, model)


def _update_seconds(setup: Setup, plan: MemoryPlan) -> float:
    work, model, gpu = setup.work, setup.model, setup.hardware.gpu_type
    state = PolicyState(work, model)
    in_a_micro_batch, tokens_per_sequence = _with_shared_prompts(work, filled_tokens(work, plan))
    tokens = work.sequences_per_rank * tokens_per_sequence
    micro_batches = work.updates_per_step * -(-work.sequences_per_update // in_a_micro_batch)
    share = _ARITHMETIC_SHARE * model.hidden / (model.hidden + _HALF_HIDDEN)
    arithmetic = tokens * flops_per_token(work, model, plan) / gpu.bfloat16_flops / share
    passes = _SUMMED_GRADIENT_PASSES if sums_matrices(work, model) else _GRADIENT_PASSES
    each = _MICRO_BATCH_SECONDS + passes * state.gradients / gpu.memory_rate
    each += _collective_bytes(work, model) / _link_rate(setup)
    stream_rate = gpu.pcie_rate * _PCIE_SHARE
    step = 2 * state.changed / gpu.memory_rate + _copy_seconds(work, state)
    step += state.offloaded_optimizer(plan) / stream_rate
    if offloads_reference(plan):
        # FSDP2 overlaps no copy of the reference on a single GPU, where it gathers nothing; on several it may.
        each += state.reference / stream_rate
    return arithmetic + micro_batches * each + work.updates_per_step * step


def _with_shared_prompts(work: Workload, tokens: int) -> tuple[int, float]:
    """Sequences of a micro-batch of at most `tokens`, and tokens of each: a prompt counts once for the responses of its
    group, unless that saves little."""
    prompt, group = work.max_prompt_tokens, work.group_size
    alone = tokens // work.max_sequence_tokens
    groups = tokens // (prompt + group * work.max_response_tokens)
    shared = groups * group or min((tokens - prompt) // work.max_response_tokens, group)
    per_sequence = work.max_response_tokens + prompt * max(groups, 1) / shared
    if per_sequence > (1 - LEAST_SAVING) * work.max_sequence_tokens:
        return alone, work.max_sequence_tokens
    return shared, per_sequence


def flops_per_token(work: Workload, model: ModelShape, plan: MemoryPlan) -> float:
    """Operations of an update for one token: a backward pass has twice those of a forward pass, of which frozen weights
    need only half; attention counts more, because it takes longer."""
    forward = forward_flops(model, work.max_sequence_tokens, _ATTENTION_COST)
    backward = 2 * forward
    if model.adapter_parameters:
        backward -= 2 * (model.parameters - model.adapter_parameters)
    extra = forward if plan.activation_checkpointing else 0
    reference = forward if work.reference_model else 0
    return forward + backward + extra + reference


def forward_flops(model: ModelShape, sequence_tokens: int, attention_cost: float = 1.0) -> float:
    """Operations of a forward pass for one token: two for each parameter, and causal attention over half of a
    sequence."""
    return 2 * model.parameters + attention_cost * 2 * model.layers * model.attention_width * sequence_tokens


def _collective_bytes(work: Workload, model: ModelShape) -> float:
    """Bytes that FSDP2 moves for a rank and micro-batch: weights, gathered twice, and float32 gradients, reduced."""
    others = (work.ranks_per_copy - 1) / work.ranks_per_copy
    return others * (2 * model.weight_bytes + 4 * model.trained_parameters)


def _link_rate(setup: Setup) -> float:
    within_pods = setup.work.policy_pods == setup.work.policy_copies
    return setup.hardware.gpu_type.link_rate * _LINK_SHARE if within_pods else _NETWORK_RATE


def _copy_seconds(work: Workload, state: PolicyState) -> float:
    """An all-reduce of a rank's gradients over the copies of the state, in a ring."""
    return 2 * (work.policy_copies - 1) / work.policy_copies * state.gradients / _NETWORK_RATE


def _weight_copy_seconds(setup: Setup, plan: MemoryPlan, copies: Copies) -> float:
    """Time that `policyOffload` adds. Trained weights move both ways; the others only back to the GPU, from their copy
    in host memory or from the model's files."""
    state = PolicyState(setup.work, setup.model)
    rate = setup.hardware.gpu_type.pcie_rate * _PCIE_SHARE
    others = state.offloaded_weights(plan) - state.weights
    return 2 * state.weights / rate + others / (rate if copies.frozen else _FILE_RATE)
