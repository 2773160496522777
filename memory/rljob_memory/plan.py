"""The first memory plan of a job: pinned settings, and for `Auto` settings the fastest values that fit.

A plan is a choice of three switches (how much of the optimizer's state is in host memory, where the weights are while
the engine generates, whether activations are recomputed) and of sizes, which follow from the room that the switches
leave. Of all choices that fit by the budget, the one with the fewest predicted seconds wins. The estimates need to be
sane rather than exact: an error shows as an out-of-memory failure, which changes the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log2
from typing import Any, Literal

from rljob_api.api_model import MAX_INTEGER
from rljob_api.memory_plan import MemoryPlan, MemorySettings, RolloutSleep
from rljob_memory.budget import PHASES, Budget, Setup, budget, gpu_budget
from rljob_memory.budget.gpu import (
    PolicyState,
    activation_bytes_per_token,
    float32_logits_bytes,
    kv_bytes,
    smallest_kv_cache_bytes,
)
from rljob_memory.budget.host import host_holds
from rljob_memory.engine_sizes import engine_sizes
from rljob_memory.plan_settings import pinned_values
from rljob_memory.sizes import GIB, MIB

_CPU_ROLE_SHARE = 0.25
"""Share of the host's memory for the activations of all policy ranks on the CPU, and for all KV caches: each."""
_BUSY_TOKENS = 8_192, 16_384
_BUSY_FLOPS = 6e13
"""Arithmetic of a micro-batch that keeps a GPU busy, and the bounds on its tokens: below, what comes once per
micro-batch (launches, the sum of gradients) takes a part of the time; above, more tokens only take memory."""
_CLEARLY_FASTER = 0.9
"""The state leaves the GPU only for this share of the predicted time, which is rough; so are activations dropped."""
NOTICEABLE = 1.05
"""A price or a gain below this ratio of seconds is within the error of the prediction. Engines get twice as many GPUs
only for more."""
_LOGPROB_CHUNK_BYTES = 256 * MIB, GIB
"""Bounds on the logits of a chunk. Every chunk adds its part to the whole gradient of the head: with chunks of 96
tokens instead of 384, an update took 0.54 s longer than 1.17 s (bench/results/memory_mitigation_cost.json)."""
_LOGPROB_CHUNK_ROOM_SHARE = 16
"""Above the lower bound, the logits take at most this fraction of the room for activations: 1/16."""
_LARGEST_LOGPROB_CHUNK_TOKENS = 8_192
_OFFLOADS = 0.0, 0.25, 0.5, 0.75, 1.0
"""Shares of the optimizer's state in host memory for which sizes are chosen. What these leave takes state back."""

SWITCHES = ("optimizer_offload", "policy_offload", "activation_checkpointing")


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and what the budget predicts of it."""

    plan: MemoryPlan
    budget: Budget
    missing_bytes: int
    """Memory that a GPU lacks, in the phase that lacks most; 0 if the plan fits."""

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def price(self) -> tuple[int, float]:
        """The smaller, the better: first the memory that is missing, then the seconds of a step. A switch has to be
        clearly faster than no switch, and larger engines noticeably faster than smaller ones."""
        switched = sum(bool(getattr(self.plan, name)) for name in SWITCHES)
        doubled = log2(self.plan.tensor_parallel_size)
        return self.missing_bytes, self.budget.seconds() * (1 / _CLEARLY_FASTER) ** switched * NOTICEABLE**doubled


def first_plan(settings: MemorySettings, setup: Setup) -> MemoryPlan:
    """The plan of generation 1. Pure: the same arguments give the same plan."""
    return best_choice(settings, setup).plan


def best_choice(settings: MemorySettings, setup: Setup) -> Choice:
    """The fastest plan that fits; if none does, the one that lacks least memory."""
    return min(choices(settings, setup), key=lambda choice: choice.price)


def choices(settings: MemorySettings, setup: Setup) -> Iterator[Choice]:
    """A plan for each combination of switches that `settings` and the host allow."""
    shares_gpu = setup.hardware.device == "cuda" and setup.work.is_colocated
    pinned = pinned_values(settings, shares_gpu=shares_gpu)
    sleeps = [pinned["rollout_sleep"]] if "rollout_sleep" in pinned else _SLEEPS if shares_gpu else _SLEEPS[:1]
    has_shards_in_pods = setup.hardware.device == "cuda" and setup.work.ranks_per_pod > 1
    possible_copies = sorted({1, setup.work.policy_pods if has_shards_in_pods else 1})
    for size, copies in product(engine_sizes(setup), possible_copies):
        work = replace(setup.work.with_engines_of(size), policy_copies=copies)
        yield from _choices(replace(setup, work=work), pinned, sleeps, shares_gpu=shares_gpu)


def _choices(
    setup: Setup, pinned: dict[str, Any], sleeps: Sequence[RolloutSleep], *, shares_gpu: bool
) -> Iterator[Choice]:
    """The choices with engines of one size, and one number of copies of the policy's state."""
    for sleep, switches in _switches(setup, pinned, sleeps):
        fixed = {name: getattr(setup.work, name) for name in ("policy_copies", "tensor_parallel_size")}
        plan = _plan(setup, pinned, {**switches, **_releases(sleep, shares_gpu=shares_gpu), **fixed})
        if plan.optimizer_offload > 0 and "optimizer_offload" not in pinned:
            plan = _with_least_offload(setup, plan)
        chosen = {name for name, is_on in switches.items() if is_on and name not in pinned}
        moves = chosen & {"optimizer_offload", "policy_offload"}
        if moves and not host_holds(setup, plan):
            continue
        predicted = budget(setup, plan)
        if "policy_offload" in chosen and predicted.total("gpu", "sync") > setup.usable_bytes("sync"):
            continue  # in a sync, the weights of policy and engine have to fit together
        if sleep == "Disabled" and len(sleeps) > 1 and not _is_roomy(setup, predicted):
            continue
        yield Choice(plan, predicted, setup.missing_bytes(predicted))


_ROOMY_SHARE = 0.8
"""Nothing is released if this share of a GPU holds everything: sleep takes 0.07 s a step, a failure half a minute."""


def _is_roomy(setup: Setup, predicted: Budget) -> bool:
    return max(predicted.total("gpu", phase) for phase in PHASES) <= _ROOMY_SHARE * setup.hardware.device_memory_bytes


_SLEEPS: Sequence[RolloutSleep] = "Disabled", "Level2"
"""Level 2: the next sync brings the weights, so none need be kept in host memory."""


def _switches(
    setup: Setup, pinned: Mapping[str, Any], sleeps: Sequence[RolloutSleep]
) -> Iterator[tuple[RolloutSleep, dict[str, float]]]:
    on_gpu = setup.hardware.device == "cuda"
    for sleep in sleeps:
        possible: dict[str, Sequence[float]] = {
            "optimizer_offload": _OFFLOADS if on_gpu else [0.0],
            # An engine that stays awake needs in the update what the weights would leave to it.
            "policy_offload": [False, True] if sleep != "Disabled" else [False],
            "activation_checkpointing": [False, True],
        }
        values = [[pinned[name]] if name in pinned else possible[name] for name in SWITCHES]
        for combination in product(*values):
            yield sleep, dict(zip(SWITCHES, combination, strict=True))


def _releases(sleep: RolloutSleep, *, shares_gpu: bool) -> dict[str, Any]:
    """Settings by which policy and engine release memory to each other on a GPU: all or nothing, since an engine that
    sleeps needs the policy's cache to wake up, and one that is awake has its memory."""
    releases = shares_gpu and sleep != "Disabled"
    keeps_buffers = shares_gpu and not releases
    return {
        "rollout_sleep": sleep,
        "empty_cache": releases,
        "weight_export": "ReservedBuffer" if keeps_buffers else "SwitchSegments",
    }


def _plan(setup: Setup, pinned: dict[str, Any], switches: dict[str, Any]) -> MemoryPlan:
    """The plan with these switches: KV cache, chunks and micro-batches, in this order, as large as they fit."""
    on_gpu = setup.hardware.device == "cuda"
    smallest = {
        "expandable_segments": on_gpu,
        "kv_cache_bytes": smallest_kv_cache_bytes(setup.work, setup.model),
        "micro_batch_tokens": setup.work.max_sequence_tokens,
        "logprob_chunk_tokens": _chunk_tokens(setup, _LOGPROB_CHUNK_BYTES[0]),
        "sync_bucket_bytes": _sync_bucket_bytes(setup),
        "detach_metrics": True,
    }
    possible = {name: min(value, MAX_INTEGER) if type(value) is int else value for name, value in smallest.items()}
    plan = MemoryPlan.model_validate(possible | switches | pinned)
    if "kv_cache_bytes" not in pinned:
        plan = plan.model_copy(update={"kv_cache_bytes": _kv_cache_bytes(setup, plan)})
    room = _room_for_activations(setup, plan)
    if "logprob_chunk_tokens" not in pinned:
        plan = plan.model_copy(update={"logprob_chunk_tokens": _chunk_tokens(setup, _chunk_bytes(setup, room))})
        room = min(room, _room_for_activations(setup, plan))
    if "micro_batch_tokens" not in pinned:
        plan = plan.model_copy(update={"micro_batch_tokens": _micro_batch_tokens(setup, plan, room)})
    return plan


def _with_least_offload(setup: Setup, plan: MemoryPlan) -> MemoryPlan:
    """`plan` with as much of the optimizer's state on the GPU as its sizes leave room for, in whole percent."""
    least = plan.model_copy(update={"optimizer_offload": 0.01})
    missing = setup.missing_bytes(gpu_budget(setup, least))
    state = PolicyState(setup.work, setup.model).optimizer
    share = 0.01 + math.ceil(100 * missing / state) / 100
    return least.model_copy(update={"optimizer_offload": round(share, 2)}) if share < plan.optimizer_offload else plan


def _kv_cache_bytes(setup: Setup, plan: MemoryPlan) -> int:
    """The need of the step's sequences at their longest, bounded by the memory left in the rollout; in whole MiB."""
    work, hardware = setup.work, setup.hardware
    if hardware.device == "cpu":
        room = int(hardware.host_memory_bytes * _CPU_ROLE_SHARE) // work.engine_processes
    else:
        pod: Literal["policy", "rollout"] = "policy" if work.is_colocated else "rollout"
        others = gpu_budget(setup, plan).total("gpu", "rollout", pod=pod) - plan.kv_cache_bytes
        room = setup.usable_bytes("rollout", pod) - others
    needed = kv_bytes(work, setup.model, work.sequences_per_engine)
    return max(min(_whole_mib(needed), room // MIB * MIB), smallest_kv_cache_bytes(work, setup.model))


def _room_for_activations(setup: Setup, plan: MemoryPlan) -> int:
    """Memory left for the activations of one rank in an update."""
    hardware = setup.hardware
    if hardware.device == "cpu":
        return int(hardware.host_memory_bytes * _CPU_ROLE_SHARE) // setup.work.policy_ranks
    whole_chunks = max(plan.logprob_chunk_tokens, plan.micro_batch_tokens)
    predicted = gpu_budget(setup, plan.model_copy(update={"micro_batch_tokens": whole_chunks}))
    others = predicted.total("gpu", "update") - predicted.bytes_of("activations", "gpu")
    return max(setup.usable_bytes("update") - others, 0)


def _micro_batch_tokens(setup: Setup, plan: MemoryPlan, room_bytes: int) -> int:
    """Return the tokens that fit: at most a rank's share of the step, at least one sequence of the maximum length."""
    work, model = setup.work, setup.model
    checkpointing, compiled = plan.activation_checkpointing, setup.hardware.layers_compiled
    fitting = room_bytes // activation_bytes_per_token(model, checkpointing=checkpointing, compiled=compiled)
    share = work.sequences_per_update * work.max_sequence_tokens
    least, most = _BUSY_TOKENS
    busy = min(max(int(_BUSY_FLOPS / (6 * model.parameters)), least), most)
    return max(min(fitting, share, busy), work.max_sequence_tokens)


def _chunk_bytes(setup: Setup, room_bytes: int) -> int:
    least, most = _LOGPROB_CHUNK_BYTES
    if setup.hardware.device == "cpu":
        return least
    return min(max(room_bytes // _LOGPROB_CHUNK_ROOM_SHARE, least), most)


def _chunk_tokens(setup: Setup, chunk_bytes: int) -> int:
    """Tokens whose float32 logits fit into a chunk; a multiple of 64 if possible, for the GPU's tiles."""
    fitting = chunk_bytes // float32_logits_bytes(setup.model.vocabulary, tokens=1)
    whole_tiles = fitting // 64 * 64
    return min(whole_tiles or max(fitting, 1), _LARGEST_LOGPROB_CHUNK_TOKENS)


def _sync_bucket_bytes(setup: Setup) -> int:
    """A quarter of the weights, within 256 MiB and 1 GiB, but never less than the largest parameter; in whole MiB."""
    quarter = min(max(setup.model.weight_bytes // 4, 256 * MIB), GIB)
    return _whole_mib(max(quarter, setup.model.largest_parameter_bytes))


def _whole_mib(size: int) -> int:
    return math.ceil(size / MIB) * MIB
