"""Host memory of one pod, by role and by use, before the job runs.

The sizes of processes are measured on CPUs (bench/results/host_memory.json); with CUDA they are assumed. All others
follow from the model, the step and the memory plan. Page cache is not counted: the kernel drops it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rljob_api.memory_plan import MemoryPlan
from rljob_api.status import Role
from rljob_memory.estimate import (
    activation_bytes_per_token,
    engine_weight_bytes,
    logprob_bytes_per_token,
    optimizer_bytes,
    policy_state_bytes,
    policy_update_bytes,
    snapshot_bytes,
)
from rljob_memory.planning.shared_memory import object_store_bytes
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import ModelShape, Workload

DeviceKind = Literal["cpu", "cuda"]
Phase = Literal["always", "loading", "training"]

PROCESS_BYTES: dict[tuple[DeviceKind, Role], int] = {
    ("cpu", "controller"): 128 * MIB,
    ("cpu", "policy"): 512 * MIB,
    ("cpu", "rollout"): 768 * MIB,
    ("cuda", "controller"): 128 * MIB,
    ("cuda", "policy"): 1536 * MIB,
    ("cuda", "rollout"): 2 * GIB,
}
"""Interpreter with torch, transformers or vLLM. With CUDA also its libraries, a context and compiled kernels, which are
assumed."""

RAY_BYTES = 384 * MIB
"""Ray's processes in one pod: raylet, agents, and the GCS in the controller's."""

_CPU_ENGINE_COPIES = 2.5
"""Multiples of its weights that vLLM holds on a CPU: as they were received, as oneDNN has packed them for its matrix
products, and the bucket that is being received. Measured with SmolLM2-135M."""

READING_BYTES = 256 * MIB
"""Weights on their way to one rank's GPU: four threads each have 8 Mi numbers, as stored and in float32, in at most 4
bytes each (`rljob_trainer.policy.weight_loading`)."""

REWARD_PROCESS_BYTES = 128 * MIB
"""One process of a reward function that imports no more than `reasoning-gym`."""


@dataclass(frozen=True, slots=True)
class HostUse:
    """One use of host memory in a pod."""

    role: Role
    use: str
    """For people: `weights being read`."""
    bytes: int
    """All processes of the pod together."""
    phase: Phase = "always"
    """Loading is over before the first update begins."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of one pod."""

    uses: tuple[HostUse, ...]

    @property
    def peak_bytes(self) -> int:
        """The larger of loading and training, beside the uses of both."""
        return self._sum("always") + max(self._sum("loading"), self._sum("training"))

    def of_role(self, role: Role) -> HostMemory:
        """The part of one role."""
        return HostMemory(tuple(use for use in self.uses if use.role == role))

    def _sum(self, phase: Phase) -> int:
        return sum(use.bytes for use in self.uses if use.phase == phase)


def worker_host_memory(
    model: ModelShape, workload: Workload, plan: MemoryPlan, device: DeviceKind, *, ranks: int, engine_processes: int
) -> HostMemory:
    """Host memory of a pod with `ranks` policy ranks and `engine_processes` processes of rollout engines."""
    uses = [
        HostUse("controller", "Ray", RAY_BYTES),
        HostUse("controller", "Ray's object store", _object_store_use_bytes(model, plan, device)),
    ]
    if ranks:
        uses += _policy(model, workload, plan, device, ranks)
    if engine_processes:
        uses += _rollout(model, workload, plan, device, engine_processes)
    return HostMemory(tuple(use for use in uses if use.bytes))


def controller_host_memory(reward_processes: int) -> HostMemory:
    """Host memory of the controller's pod. `reward_processes`: 0 if rewards are computed in the controller itself."""
    return HostMemory(
        (
            HostUse("controller", "process", PROCESS_BYTES["cuda", "controller"]),
            HostUse("controller", "Ray", RAY_BYTES),
            HostUse("controller", "reward functions", reward_processes * REWARD_PROCESS_BYTES),
        )
    )


def loading_bytes(model: ModelShape, device: DeviceKind) -> int:
    """Host memory with which one rank fills its shards, apart from these.

    Ranks read the rows of their own shards, piece by piece; adapters are drawn whole, in float32, and then sharded. On
    a CPU the shards are in host memory, too: what an update adds to them is more than this.
    """
    return 0 if device == "cpu" else READING_BYTES + 4 * model.adapter_parameters


def checkpoint_copy_bytes(model: ModelShape, workload: Workload, plan: MemoryPlan) -> int:
    """Copy of masters and moments of one rank from which a checkpoint is written. An offloaded state needs none."""
    if plan.optimizer_offload:
        return 0
    return (4 + 2 * workload.moment_bytes) * model.trained_parameters // workload.policy_ranks


def _policy(
    model: ModelShape, workload: Workload, plan: MemoryPlan, device: DeviceKind, ranks: int
) -> Iterator[HostUse]:
    yield HostUse("policy", "processes", ranks * PROCESS_BYTES[device, "policy"])
    yield HostUse("policy", "weights being read", ranks * loading_bytes(model, device), "loading")
    copy = ranks * checkpoint_copy_bytes(model, workload, plan)
    yield HostUse("policy", "copy for checkpoints", copy, "training")
    if workload.policy_ranks > 1:  # if the host has room: `rljob_memory.plan.keeps_snapshots`
        snapshot = snapshot_bytes(model, workload) // workload.policy_ranks
        yield HostUse("policy", "snapshot to undo an update", ranks * snapshot, "training")
    if device == "cpu":
        state = policy_state_bytes(model, workload, optimizer_offload=False)
        yield HostUse("policy", "weights and optimizer", ranks * state, "training")
        update = policy_update_bytes(model, workload)
        yield HostUse("policy", "gradients", ranks * update, "training")
        yield HostUse("policy", "activations", ranks * _activation_bytes(model, workload, plan), "training")
    elif plan.optimizer_offload:
        state = optimizer_bytes(model, workload) // workload.policy_ranks
        yield HostUse("policy", "pinned optimizer state", ranks * state, "training")
        if workload.reference_model and not model.adapter_parameters:
            reference = model.weight_bytes // workload.policy_ranks
            yield HostUse("policy", "reference model", ranks * reference, "training")


def _object_store_use_bytes(model: ModelShape, plan: MemoryPlan, device: DeviceKind) -> int:
    """The part of the object store in which weights are on their way, on CPUs, and a step's rollouts."""
    whole = object_store_bytes(plan.sync_bucket_bytes, device)
    in_transit = whole - object_store_bytes(0, device)
    return whole - in_transit + min(in_transit, model.weight_bytes)


def _activation_bytes(model: ModelShape, workload: Workload, plan: MemoryPlan) -> int:
    """Of one rank, in the largest micro-batch that a step can fill, with the logits of one chunk."""
    step_tokens = workload.sequences_per_rank * workload.max_sequence_tokens
    per_token = activation_bytes_per_token(model, checkpointing=plan.activation_checkpointing)
    chunk = min(plan.logprob_chunk_tokens, workload.sequences_per_rank * workload.max_response_tokens)
    return min(plan.micro_batch_tokens, step_tokens) * per_token + chunk * logprob_bytes_per_token(model, fused=False)


def _rollout(
    model: ModelShape, workload: Workload, plan: MemoryPlan, device: DeviceKind, processes: int
) -> Iterator[HostUse]:
    yield HostUse("rollout", "processes", processes * PROCESS_BYTES[device, "rollout"])
    weights = processes * engine_weight_bytes(model, workload)
    if device == "cpu":
        yield HostUse("rollout", "weights", int(_CPU_ENGINE_COPIES * weights))
        yield HostUse("rollout", "KV cache", processes * plan.kv_cache_bytes)
    elif plan.rollout_sleep_level == 1:
        yield HostUse("rollout", "weights of the sleeping engine", weights, "training")
