"""Prediction of the host memory, /dev/shm and disk of a job."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.topology import worker_pods
from rljob_memory.estimate import snapshot_bytes
from rljob_memory.plan import copies_frozen_weights, first_plan, keeps_snapshots
from rljob_memory.planning.host_memory import (
    ROOM_FOR_COPIES,
    Copies,
    DeviceKind,
    HostMemory,
    shared_memory_bytes,
    worker_host_memory,
)
from rljob_memory.sizes import GIB, human_bytes
from rljob_memory.workload import Hardware, ModelShape, Workload, workload_of

_ASSUMED = {
    "cuda": Hardware("cuda", device_memory_bytes=80 * GIB, host_memory_bytes=2048 * GIB, torch_version="2.11.0"),
    "cpu": Hardware("cpu", device_memory_bytes=0, host_memory_bytes=16 * GIB, torch_version="2.11.0"),
}
"""Machines of the first plan, as long as the job's own is not known."""

_USABLE = 0.9
"""Share of the host's memory that is planned with."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Memory that a job is predicted to need, apart from the GPU."""

    worker: HostMemory
    """One pod of the policy, with the engines in it."""
    rollout: HostMemory | None
    """One pod of engines alone; None if they are in the policy's pods."""
    shared_memory_bytes: int
    """/dev/shm of a worker. What is used of it counts as host memory, too."""
    disk: Disk

    def summary(self) -> str:
        """One line: `host memory 15.2 GiB a worker (…), /dev/shm 128 MiB, disk 21.0 GiB (…)`."""
        uses = sorted(self.worker.uses, key=lambda use: -use.bytes)
        shown = ", ".join(f"{use.role} {use.use} {human_bytes(use.bytes)}" for use in uses[:4])
        disk = self.disk
        return (
            f"host memory {human_bytes(self.worker.peak_bytes)} a worker (largest: {shown}), "
            f"/dev/shm {human_bytes(self.shared_memory_bytes)}, disk {human_bytes(disk.total_bytes)} "
            f"({disk.checkpoints} checkpoints of {human_bytes(disk.checkpoint_bytes)})"
        )


def predict(
    spec: RLJobSpec, model: ModelShape, plan: MemoryPlan, device: DeviceKind, copies: Copies = ROOM_FOR_COPIES
) -> Prediction:
    """The prediction under a memory plan. Pure."""
    workload, lora = workload_of(spec), spec.policy.lora
    alone = lora is not None and lora.export == "Adapter"
    policy, *apart = worker_pods(spec)
    ranks = policy.processes_per_pod
    in_engines = (apart or [policy])[0].processes_per_pod
    sharing = in_engines if workload.tensor_parallel_size > 1 else 0
    pods = [(ranks, 0), (0, sharing)] if apart else [(ranks, sharing)]
    return Prediction(
        worker=worker_host_memory(
            model,
            workload,
            plan,
            device,
            ranks=ranks,
            engine_processes=0 if apart else in_engines,
            copies=copies,
            exported_bytes=4 * model.adapter_parameters if alone else None,
        ),
        rollout=worker_host_memory(model, workload, plan, device, ranks=0, engine_processes=in_engines)
        if apart
        else None,
        shared_memory_bytes=max(shared_memory_bytes(plan.sync_bucket_bytes, device, *pod) for pod in pods),
        disk=_predicted_disk(spec, model, workload, device),
    )


def copies_in_host_memory(spec: RLJobSpec, model: ModelShape, plan: MemoryPlan, hardware: Hardware) -> Copies:
    """The copies that the policy's ranks keep on a machine.

    That for checkpoints comes last: without it, a checkpoint is written from where the state is, and the next optimizer
    step waits. Frozen weights are not copied either if that does not fit beside the processes and the exported model.
    """
    workload = workload_of(spec)
    copies = Copies(
        snapshot=keeps_snapshots(hardware, model, workload),
        checkpoint=True,
        frozen=copies_frozen_weights(hardware, model, workload, plan),
    )
    for without in ({"checkpoint": False}, {"frozen": False}):
        needed = spec.policy.replicas * predict(spec, model, plan, hardware.device, copies).worker.peak_bytes
        if needed <= hardware.host_memory_bytes * _USABLE:
            break
        copies = replace(copies, **without)
    return copies


def predict_before_plan(spec: RLJobSpec, model: ModelShape, device: DeviceKind) -> Prediction:
    """The prediction for a machine that is not known yet: with or without `optimizerOffload`, the larger, if it is
    `Auto`."""
    workload = workload_of(spec)
    plan = first_plan(spec.memory, _ASSUMED[device], model, workload)
    plans = [plan]
    if spec.memory.optimizer_offload == "Auto" and device == "cuda":
        plans = [plan.model_copy(update={"optimizer_offload": offload}) for offload in (False, True)]
    predictions = [predict(spec, model, each, device) for each in plans]
    return max(predictions, key=lambda prediction: prediction.worker.peak_bytes)


# Disk that a job needs for its checkpoints, its trained model, its model cache and compiled code.

_HUB_BYTES_PER_PARAMETER = 2
"""Models of the hub are stored in bfloat16."""

_COMPILED_BYTES = 1 << 30
"""Code that torch, Triton and vLLM compile for one model, and a copy while it is replaced: assumed. On a CPU,
forward and backward of one small layer take 0.6 MB (tests/integration/test_pods_run.py), but the trainer
compiles nothing there."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes on the checkpoints' volume."""

    checkpoint_bytes: int
    """One checkpoint."""
    checkpoints: int
    """Checkpoints that exist at once: those that are kept, and the one that is being written."""
    model_bytes: int
    """The trained model."""
    cache_bytes: int
    """Cache of a model of the hub; 0 if it is on another volume."""
    compiled_bytes: int
    """Compiled code; 0 if it is on another volume."""

    @property
    def total_bytes(self) -> int:
        return self.checkpoints * self.checkpoint_bytes + self.model_bytes + self.cache_bytes + self.compiled_bytes


def _predicted_disk(spec: RLJobSpec, model: ModelShape, workload: Workload, device: DeviceKind) -> Disk:
    """The journal is not counted: a few MB a step, deleted with the checkpoints that cover it."""
    lora = spec.policy.lora
    exported = model.weight_bytes
    if lora is not None and lora.export == "Adapter":
        exported = 4 * model.adapter_parameters
    cached = spec.model.uri.startswith("hf://") and spec.model.cache is None
    on_claim = spec.model.cache is not None and spec.model.cache.compiled
    return Disk(
        checkpoint_bytes=snapshot_bytes(model, workload),
        checkpoints=spec.checkpoint.keep + 1,
        model_bytes=exported,
        cache_bytes=_HUB_BYTES_PER_PARAMETER * model.parameters if cached else 0,
        compiled_bytes=_COMPILED_BYTES if device == "cuda" and not on_claim else 0,
    )
