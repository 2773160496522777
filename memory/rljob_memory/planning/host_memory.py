"""Host memory of one pod, by role and by use, before the job runs.

The sizes of processes are measured (on CPUs in bench/results/host_memory.json). All others follow from the model, the
step and the memory plan. Page cache is not counted: the kernel drops it.
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
    policy_weight_bytes,
    reference_bytes,
    snapshot_bytes,
    trained_weight_bytes,
)
from rljob_memory.sizes import MIB
from rljob_memory.workload import ModelShape, Workload

DeviceKind = Literal["cpu", "cuda"]
Phase = Literal["always", "loading", "training", "updating", "exporting"]

PROCESS_BYTES: dict[tuple[DeviceKind, Role], int] = {
    ("cpu", "controller"): 128 * MIB,
    ("cpu", "policy"): 512 * MIB,
    ("cpu", "rollout"): 768 * MIB,
    ("cuda", "controller"): 128 * MIB,
    ("cuda", "policy"): 2560 * MIB,
    ("cuda", "rollout"): 2560 * MIB,
}
"""Interpreter with torch, transformers or vLLM. With CUDA also its libraries, contexts and compiled kernels: resident
memory on two H200s, without the state that is in host memory, was 2.0 to 2.6 GiB for a policy rank and 2.0 to 2.4 GiB
for an engine process (torch 2.11, vLLM 0.26)."""

RAY_BYTES = 384 * MIB
"""Ray's processes in one pod: raylet, agents, and the GCS in the controller's."""

_CPU_ENGINE_COPIES = 2.5
"""Multiples of its weights that vLLM holds on a CPU: as they were received, as oneDNN has packed them for its matrix
products, and the bucket that is being received. Measured with SmolLM2-135M."""

READING_BYTES = 256 * MIB
"""Weights on their way to one rank's GPU: four threads each have 8 Mi numbers, as stored and in float32, in at most 4
bytes each (`rljob_trainer.policy.weight_loading`)."""

PIECES_BYTES = 512 * MIB
"""A checkpoint on its way between one rank and its files: eight threads each hold about four pieces of 16 MiB;
of a small model, its state twice (`rljob_trainer.policy.checkpoint_layout`)."""

_OFFLOADED = "weights while the engine generates"

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
    """Loading is over before the first update begins. What training needs stays until the end: updates come on top,
    and then the export."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of one pod."""

    uses: tuple[HostUse, ...]

    @property
    def peak_bytes(self) -> int:
        """The larger of loading and training, beside the uses of both; in training, the larger of update and export."""
        training = self._sum("training") + max(self._sum("updating"), self._sum("exporting"))
        return self._sum("always") + max(self._sum("loading"), training)

    def of_role(self, role: Role) -> HostMemory:
        """The part of one role."""
        return HostMemory(tuple(use for use in self.uses if use.role == role))

    def _sum(self, phase: Phase) -> int:
        return sum(use.bytes for use in self.uses if use.phase == phase)


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of the policy that its ranks keep in host memory if there is room for them
    (`planning.prediction.copies_in_host_memory`)."""

    snapshot: bool = True
    """Of several ranks, to undo an update (`rljob_memory.plan.keeps_snapshots`)."""
    checkpoint: bool | None = None
    """For writing a checkpoint while the next steps run. None: a copy is made unless the state is in host memory."""
    frozen: bool = True
    """With `policyOffload`, of weights that are not trained (`rljob_memory.plan.copies_frozen_weights`)."""


ROOM_FOR_COPIES = Copies()
"""On a machine that is not known yet."""


def worker_host_memory(
    model: ModelShape,
    workload: Workload,
    plan: MemoryPlan,
    device: DeviceKind,
    *,
    ranks: int,
    engine_processes: int,
    copies: Copies = ROOM_FOR_COPIES,
    exported_bytes: int | None = None,
) -> HostMemory:
    """Host memory of a pod with `ranks` policy ranks and `engine_processes` processes of rollout engines.

    `exported_bytes`: of the trained model, which rank 0 collects; None: all of its weights.
    """
    uses = [
        HostUse("controller", "Ray", RAY_BYTES),
        HostUse("controller", "Ray's object store", _object_store_use_bytes(model, plan, device)),
    ]
    if ranks:
        exported = model.weight_bytes if exported_bytes is None else exported_bytes
        uses += _policy(model, workload, plan, device, ranks, copies)
        offloaded = ranks * _offloaded_bytes(model, workload, plan, copies.frozen)
        uses.append(HostUse("policy", _OFFLOADED, offloaded, "training"))
        uses.append(HostUse("policy", "exported model", exported, "exporting"))
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


def checkpoint_copy_bytes(model: ModelShape, workload: Workload) -> int:
    """Copy of masters and moments of one rank from which a checkpoint is written."""
    return snapshot_bytes(model, workload) // workload.policy_ranks


def _policy(
    model: ModelShape, workload: Workload, plan: MemoryPlan, device: DeviceKind, ranks: int, copies: Copies
) -> Iterator[HostUse]:
    yield HostUse("policy", "processes", ranks * PROCESS_BYTES[device, "policy"])
    yield HostUse("policy", "weights being read", ranks * loading_bytes(model, device), "loading")
    if not plan.optimizer_offload if copies.checkpoint is None else copies.checkpoint:
        copy = ranks * checkpoint_copy_bytes(model, workload)
        yield HostUse("policy", "copy for checkpoints", copy, "updating")  # dropped before the export
    if device == "cuda":  # on a CPU, less than what is too much for activations
        share = snapshot_bytes(model, workload) // workload.policy_ranks
        yield HostUse("policy", "pieces of a checkpoint", ranks * min(PIECES_BYTES, 2 * share), "training")
    if workload.policy_ranks > 1 and copies.snapshot and not plan.optimizer_offload:
        snapshot = snapshot_bytes(model, workload) // workload.policy_ranks
        yield HostUse("policy", "snapshot to undo an update", ranks * snapshot, "training")
    if device == "cpu":
        state = policy_state_bytes(model, workload, optimizer_offload=False)
        yield HostUse("policy", "weights and optimizer", ranks * state, "training")
        update = policy_update_bytes(model, workload)
        yield HostUse("policy", "gradients", ranks * update, "updating")
        yield HostUse("policy", "activations", ranks * _activation_bytes(model, workload, plan), "updating")
    elif plan.optimizer_offload:
        state = optimizer_bytes(model, workload) // workload.policy_ranks
        yield HostUse("policy", "pinned optimizer state", ranks * state, "training")
        reference = reference_bytes(model, workload) // workload.policy_ranks
        yield HostUse("policy", "reference model", ranks * reference, "training")


def _offloaded_bytes(model: ModelShape, workload: Workload, plan: MemoryPlan, copies_frozen: bool) -> int:
    """Copy of one rank's weights with `policyOffload`."""
    if not plan.policy_offload or workload.topology == "Disaggregated":
        return 0
    if copies_frozen:
        return policy_weight_bytes(model, workload, optimizer_offload=plan.optimizer_offload)
    return trained_weight_bytes(model, workload) // workload.policy_ranks


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


# /dev/shm of a pod or machine: Ray's object store, and buffers of NCCL and vLLM.

_SMALLEST_OBJECT_STORE_BYTES = 128 * MIB

_NCCL_BYTES_PER_RANK = 64 * MIB
"""NCCL's buffers for GPUs of one machine without peer-to-peer access. Not measured."""

_VLLM_QUEUE_BYTES = 24 * MIB
"""vLLM's queue between the processes of an engine, six messages of 4 MiB; counted for each of them."""


def object_store_bytes(sync_bucket_bytes: int, device: DeviceKind) -> int:
    """Size for a step's rollouts and, on CPUs, two buckets of weights: one is read while the next is packed.

    On GPUs the weights do not pass through the object store.
    """
    buckets = 2 if device == "cpu" else 0
    return _SMALLEST_OBJECT_STORE_BYTES + buckets * sync_bucket_bytes


def shared_memory_bytes(
    sync_bucket_bytes: int, device: DeviceKind, ranks: int, tensor_parallel_processes: int = 0
) -> int:
    """The object store and the buffers of one pod's processes that communicate.

    `ranks`: policy ranks of the pod. `tensor_parallel_processes`: its processes of engines that have several each.
    """
    in_groups = (ranks if ranks > 1 else 0) + tensor_parallel_processes
    nccl = _NCCL_BYTES_PER_RANK * in_groups if device == "cuda" else 0
    return object_store_bytes(sync_bucket_bytes, device) + nccl + _VLLM_QUEUE_BYTES * tensor_parallel_processes
