"""Host memory, /dev/shm and disk of a job.

The sizes of processes are measured: on CPUs in bench/results/host_memory.json, on H200s in moments.json. All others
follow from the model, the step and the memory plan. Page cache is not counted: the kernel drops it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rljob_api.memory_plan import MemoryPlan
from rljob_api.status import Role
from rljob_memory.budget.gpu import (
    PolicyState,
    activation_bytes_per_token,
    backward_buffers,
    computes_logits_in_float32,
    engine_weight_bytes,
    filled_chunk_tokens,
    filled_tokens,
    float32_head_bytes,
    logits_bytes,
    offloads_reference,
)
from rljob_memory.budget.lines import ALWAYS, UPDATE, Line, Phase, Pod
from rljob_memory.budget.setup import Setup
from rljob_memory.hardware import DeviceKind
from rljob_memory.model_shape import ModelShape
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import Workload

PROCESS_BYTES: dict[tuple[DeviceKind, Role], int] = {
    ("cpu", "policy"): 512 * MIB,
    ("cpu", "rollout"): 768 * MIB,
    ("cuda", "policy"): 2272 * MIB,
    ("cuda", "rollout"): 2048 * MIB,
}
"""Interpreter with torch, transformers or vLLM. With CUDA also its libraries, contexts and compiled kernels: resident
memory, without the state that is in host memory, was 2.06 to 2.24 GiB for a policy rank on an H100 and 1.96 to 1.99 GiB
for an engine process (plan_accuracy.json, topologies.json; torch 2.11, vLLM 0.26)."""

_GROUP_BYTES = 384 * MIB
"""Additional memory of a process in a group of NCCL: a policy rank takes 2.3 to 2.6 GiB, an engine process 2.2 to 2.4
GiB (topologies.json, tensor_parallel.json)."""

RAY_BYTES = 384 * MIB
"""Ray's processes in one pod: raylet, agents, and the GCS in the controller's."""

_CPU_ENGINE_COPIES = 2.5
"""Multiples of its weights that vLLM holds on a CPU: as they were received, as oneDNN has packed them for its matrix
products, and the bucket that is being received. Measured with SmolLM2-135M."""

_PINNED_REFERENCE = 1.6
"""Multiples of its weights that a reference model in pinned host memory takes, measured with Qwen3-4B in
bench/results/plan_accuracy.json. torch rounds each of its parameters up to a power of two: that alone is 1.4."""

_PINNED_ENGINE_WEIGHTS = 1.38
"""Multiples of its weights that an engine takes asleep at level 1: torch pins vLLM's copies, and rounds each up to a
power of two. 1.37 to 1.38 with 8B (plan_accuracy.json)."""

_KERNELS_OF_8_BITS_BYTES = 64 * MIB
"""Additional memory of an engine in 8 bits: 30 to 70 MiB (plan_accuracy.json)."""

_SECOND_VARIANT_BYTES = int(0.3 * GIB)
"""Code of the layers that are compiled once more, without adapters, for the KL term: 0.3 GiB with 4B and 8B
(plan_accuracy.json)."""

READING_BYTES = 256 * MIB
"""Weights on their way to one rank's GPU: four threads each have 8 Mi numbers, as stored and in float32, in at most 4
bytes each (`rljob_trainer.policy.weight_loading`)."""

_PIECES_BYTES = 512 * MIB
"""A checkpoint on its way between one rank and its files: eight threads each hold about four pieces of 16 MiB;
of a small model, its state twice (`rljob_trainer.policy.checkpoint_layout`)."""

_SMALLEST_OBJECT_STORE_BYTES = 128 * MIB

_SHARED_NCCL_BYTES = 64 * MIB
"""In /dev/shm: NCCL's buffers of a rank, for GPUs of one machine without peer-to-peer access. Not measured."""

_VLLM_QUEUE_BYTES = 24 * MIB
"""In /dev/shm: vLLM's queue between the processes of an engine, six messages of 4 MiB; counted for each of them."""

_SHARED_SLACK_BYTES, _SHARED_SLACK_PART = 16 * MIB, 16
"""In /dev/shm: small files of torch, and of Ray besides its object store, which starts only if it fits. The larger of
the two counts, the second as a part of the store."""

_HUB_BYTES_PER_PARAMETER = 2
"""Models of the hub are stored in bfloat16."""

_COMPILED_BYTES = GIB
"""Code that torch, Triton and vLLM compile for one model, and a copy while it is replaced: assumed. On a CPU,
forward and backward of one small layer take 0.6 MB, but the trainer compiles nothing there."""

USABLE_HOST_SHARE = 0.95
"""Share of the host's memory that is planned with: the budget of host memory is an upper bound."""

_SNAPSHOT_SHARE = 0.5
"""Share of the host's memory for snapshots, with the copy of a checkpoint."""

_TRAINING: frozenset[Phase] = ALWAYS - {"start"}
_BEFORE_EXPORT: frozenset[Phase] = _TRAINING - {"export"}


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of the policy that its ranks keep in host memory if there is room for them."""

    snapshot: bool = True
    """Copy of the state of several ranks, to undo an update in which one of them fails: a restart takes longest."""
    checkpoint: bool | None = None
    """Copy for writing a checkpoint while the next steps run. Without it, a checkpoint is written from the state
    itself, and the next optimizer step waits. None: a copy is made unless the state is in host memory."""
    frozen: bool = True
    """With `policyOffload`, of weights that are not trained. Otherwise they are read from the model's files again."""


FEWEST_COPIES = Copies(snapshot=False, checkpoint=False, frozen=False)


def copies_with_room(setup: Setup, plan: MemoryPlan) -> Copies:
    """The copies for which the host has room. That for checkpoints is given up first, then that of frozen weights."""
    setup = setup.under(plan)
    work, model, hardware = setup.work, setup.model, setup.hardware
    state = PolicyState(work, model)
    copied = 2 * state.changed + (state.changed if hardware.device == "cpu" else 0)
    snapshot = work.policy_ranks > 1 and copied * work.policy_ranks <= hardware.host_memory_bytes * _SNAPSHOT_SHARE
    copies = Copies(snapshot, checkpoint=True)
    for fewer in (Copies(snapshot, checkpoint=False), Copies(snapshot, checkpoint=False, frozen=False)):
        if host_holds(setup, plan, copies):
            break
        copies = fewer
    return copies


def host_holds(setup: Setup, plan: MemoryPlan, copies: Copies | None = None) -> bool:
    """True if the host has room for the policy's pods with `copies`.

    Without `copies`, the question is whether the plan itself has room: with the fewest copies. The export of the model,
    which every plan needs, then counts only together with an optimizer's state in host memory.
    """
    phases = ALWAYS if copies or plan.optimizer_offload else ALWAYS - {"export"}
    setup, copies = setup.under(plan), copies or FEWEST_COPIES
    lines = [line for line in _worker_lines(setup, plan, copies) if line.place == "host" and line.pod == "policy"]
    peak = max(sum(line.bytes for line in lines if phase in line.phases) for phase in phases)
    return peak * setup.work.policy_pods <= setup.hardware.host_memory_bytes * USABLE_HOST_SHARE


def host_lines(setup: Setup, plan: MemoryPlan, copies: Copies) -> Iterator[Line]:
    """The lines of host memory and /dev/shm, for each kind of pod, and of disk."""
    yield from _worker_lines(setup, plan, copies)
    yield from _disk_lines(setup)


def _worker_lines(setup: Setup, plan: MemoryPlan, copies: Copies) -> Iterator[Line]:
    work, model, device = setup.work, setup.model, setup.hardware.device
    pods: tuple[Pod, ...] = ("policy",) if work.is_colocated else ("policy", "rollout")
    for pod in pods:
        yield Line("controller", "Ray", "host", RAY_BYTES, ALWAYS, "its processes", pod)
        transit = min(
            object_store_bytes(plan.sync_bucket_bytes, device) - _SMALLEST_OBJECT_STORE_BYTES, model.weight_bytes
        )
        store = _SMALLEST_OBJECT_STORE_BYTES + transit
        yield Line("controller", "Ray's object store", "host", store, ALWAYS, "rollouts, and weights on CPUs", pod)
        shared = object_store_bytes(plan.sync_bucket_bytes, device)
        yield Line("controller", "Ray's object store", "shm", shared, ALWAYS, "rollouts, and weights on CPUs", pod)
        slack = max(_SHARED_SLACK_BYTES, shared // _SHARED_SLACK_PART)
        yield Line("controller", "small files", "shm", slack, ALWAYS, "Ray and torch", pod)
        yield from _beside_the_object_store(work, device, pod)
    yield from _policy_lines(setup, plan, copies)
    yield from _engine_lines(setup, plan)


def _policy_lines(setup: Setup, plan: MemoryPlan, copies: Copies) -> Iterator[Line]:
    work, model, device = setup.work, setup.model, setup.hardware.device
    state, ranks = PolicyState(work, model), work.ranks_per_pod

    def line(use: str, of_a_rank: int, phases: frozenset[Phase], reason: str) -> Line:
        return Line("policy", use, "host", ranks * of_a_rank, phases, reason)

    in_group = work.policy_ranks > 1 or not work.is_colocated
    yield line("processes", _process_bytes(device, "policy", in_group=in_group), ALWAYS, f"{ranks} ranks")
    if device == "cuda" and model.adapter_parameters:
        # Drawn by each rank, in pieces that the allocator keeps; not with several ranks, which shard them.
        drawn = 4 * model.adapter_parameters if work.policy_ranks == 1 else 0
        yield line("adapters as drawn", drawn, ALWAYS, "float32")
        second = _SECOND_VARIANT_BYTES if work.reference_model else 0
        yield line("layers without adapters", second, _TRAINING, "compiled, for algorithm.klCoefficient")
    yield line("weights being read", loading_bytes(model, device), frozenset({"start"}), "pieces of files")
    if not plan.optimizer_offload if copies.checkpoint is None else copies.checkpoint:
        yield line("copy for checkpoints", state.changed, _BEFORE_EXPORT, "masters and moments")
    if work.policy_ranks > 1 and copies.snapshot and not plan.optimizer_offload:
        yield line("snapshot to undo an update", state.changed, _TRAINING, "several ranks")
    if plan.policy_offload and work.is_colocated:
        weights = state.offloaded_weights(plan) if copies.frozen else state.weights
        yield line("weights while the engine generates", weights, _TRAINING, "policyOffload")
    if device == "cpu":
        yield line("weights and optimizer", state.changed + state.frozen + state.reference, _TRAINING, "on the CPU")
        gradients = state.gradients + sum(backward_buffers(work, model).values())
        yield line("gradients", gradients, UPDATE, "float32")
        yield line("activations", _activation_bytes(work, model, plan), UPDATE, "a micro-batch, and its logits")
    else:
        # On a CPU, these are less than what is too much for activations.
        yield line("pieces of a checkpoint", min(_PIECES_BYTES, 2 * state.changed), _TRAINING, "being written or read")
    if device == "cuda" and plan.optimizer_offload:
        yield line("pinned optimizer state", state.offloaded_optimizer(plan), _TRAINING, "optimizerOffload")
        if offloads_reference(plan):
            yield line("reference model", int(_PINNED_REFERENCE * state.reference), _TRAINING, "optimizerOffload")
    exported = _exported_bytes(work, model)
    yield Line("policy", "exported model", "host", exported, frozenset({"export"}), "collected by rank 0")


def _engine_lines(setup: Setup, plan: MemoryPlan) -> Iterator[Line]:
    work, model, device = setup.work, setup.model, setup.hardware.device
    pod: Pod = "policy" if work.is_colocated else "rollout"
    processes = work.engine_processes_per_pod

    def line(use: str, of_a_process: float, phases: frozenset[Phase], reason: str) -> Line:
        return Line("engine", use, "host", processes * int(of_a_process), phases, reason, pod)

    in_group = work.tensor_parallel_size > 1 or not work.is_colocated
    each = _process_bytes(device, "rollout", in_group=in_group)
    if work.quantized_weights or work.quantized_kv_cache:
        each += _KERNELS_OF_8_BITS_BYTES
    yield line("engine processes", each, ALWAYS, f"{processes} processes")
    weights = engine_weight_bytes(work, model)
    if device == "cpu":
        yield line("engine's weights", _CPU_ENGINE_COPIES * weights, ALWAYS, "as received, and packed")
        yield line("KV cache", plan.kv_cache_bytes, ALWAYS, "memory.kvCache")
        if computes_logits_in_float32(work, model):
            yield line("engine's head", float32_head_bytes(model), frozenset({"rollout"}), "copied to float32")
    elif plan.rollout_sleep_level == 1:
        pinned = _PINNED_ENGINE_WEIGHTS * weights
        yield line("weights of the sleeping engine", pinned, _TRAINING, "rolloutSleep: Level1")


def _process_bytes(device: DeviceKind, role: Role, *, in_group: bool) -> int:
    return PROCESS_BYTES[device, role] + (_GROUP_BYTES if in_group and device == "cuda" else 0)


def _activation_bytes(work: Workload, model: ModelShape, plan: MemoryPlan) -> int:
    each = activation_bytes_per_token(model, checkpointing=plan.activation_checkpointing, compiled=False)
    chunk = min(filled_chunk_tokens(work, plan), work.sequences_per_update * work.max_response_tokens)
    head = float32_head_bytes(model) if model.bytes_per_parameter < 4 else 0
    return filled_tokens(work, plan) * each + logits_bytes(model, chunk, compiled=False) + head


def loading_bytes(model: ModelShape, device: DeviceKind) -> int:
    """Host memory with which one rank fills its shards, apart from these.

    Ranks read the rows of their own shards, piece by piece; adapters are drawn whole, in float32, and then sharded. On
    a CPU the shards are in host memory, too: what an update adds to them is more than this.
    """
    return 0 if device == "cpu" else READING_BYTES + 4 * model.adapter_parameters


def object_store_bytes(sync_bucket_bytes: int, device: DeviceKind) -> int:
    """Size of Ray's object store for a step's rollouts and, on CPUs, two buckets of weights: one is read while the next
    is packed. On GPUs the weights do not pass through the object store."""
    buckets = 2 if device == "cpu" else 0
    return _SMALLEST_OBJECT_STORE_BYTES + buckets * sync_bucket_bytes


def object_store_room(free_bytes: int, beside_bytes: int) -> int:
    """Size of Ray's object store in a pod whose /dev/shm has so much free, `beside_bytes` of it for others. In a pod of
    the predicted size, that is the predicted store."""
    room = max(free_bytes - beside_bytes, 0)
    return max(room - max(_SHARED_SLACK_BYTES, room // (_SHARED_SLACK_PART + 1)), 0)


def beside_the_object_store_bytes(work: Workload, device: DeviceKind, pod: Pod) -> int:
    """Part of a pod's /dev/shm: NCCL's buffers and vLLM's queues."""
    return sum(line.bytes for line in _beside_the_object_store(work, device, pod))


def _beside_the_object_store(work: Workload, device: DeviceKind, pod: Pod) -> Iterator[Line]:
    ranks = work.ranks_per_pod if pod == "policy" and work.ranks_per_pod > 1 else 0
    # Pods are created before a plan has chosen the engines.
    may_share = device == "cuda" and work.auto_engines and work.engine_processes_per_pod > 1
    has_engines = (may_share or work.tensor_parallel_size > 1) and (pod == "rollout" or work.is_colocated)
    of_engines = work.engine_processes_per_pod if has_engines else 0
    if device == "cuda":
        size = _SHARED_NCCL_BYTES * (ranks + of_engines)
        yield Line("policy", "NCCL", "shm", size, ALWAYS, "without peer-to-peer access", pod)
    queues = _VLLM_QUEUE_BYTES * of_engines
    yield Line("engine", "vLLM's queues", "shm", queues, ALWAYS, "rollout.tensorParallelSize", pod)


def processes_bytes(work: Workload, device: DeviceKind, pod: Pod) -> int:
    """Host memory of a pod's processes without a model."""
    ranks = work.ranks_per_pod if pod == "policy" else 0
    engines = work.engine_processes_per_pod if pod == "rollout" or work.is_colocated else 0
    each = PROCESS_BYTES[device, "policy"], PROCESS_BYTES[device, "rollout"]
    return RAY_BYTES + _SMALLEST_OBJECT_STORE_BYTES + ranks * each[0] + engines * each[1]


def _disk_lines(setup: Setup) -> Iterator[Line]:
    """The journal is not counted: a few MB a step, deleted with the checkpoints that cover it."""
    work, model = setup.work, setup.model

    def line(use: str, size: int, reason: str) -> Line:
        return Line("controller", use, "disk", size, ALWAYS, reason)

    held = work.kept_checkpoints + 1
    yield line(
        "checkpoints", held * checkpoint_bytes(work, model), f"{held} × masters and moments; one is being written"
    )
    reason = "policy.lora.export" if work.exports_adapters else ""
    if work.kept_models > 1:
        reason = f"{work.kept_models} ×, with the best and exports, one of which is being written"
    yield line("trained model", work.kept_models * _exported_bytes(work, model), reason)
    if work.caches_model:
        yield line("model cache", _HUB_BYTES_PER_PARAMETER * model.parameters, "of the hub")
    if setup.hardware.device == "cuda" and work.caches_compiled_code:
        yield line("compiled code", _COMPILED_BYTES, "assumed")


def checkpoint_bytes(work: Workload, model: ModelShape) -> int:
    """Size of one checkpoint on disk: masters and moments of all ranks."""
    return PolicyState(work, model).changed * work.ranks_per_copy


def _exported_bytes(work: Workload, model: ModelShape) -> int:
    return 4 * model.adapter_parameters if work.exports_adapters else model.weight_bytes
