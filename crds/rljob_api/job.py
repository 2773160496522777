"""RLJob: one reinforcement learning job."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.api_model import ApiModel, Rule, Text, immutable, immutable_presence
from rljob_api.checkpoint import CheckpointSpec
from rljob_api.fault_injection import FaultInjection
from rljob_api.memory_settings import MemorySettings
from rljob_api.metadata import Metadata
from rljob_api.model import ModelSpec
from rljob_api.recovery import RecoverySpec
from rljob_api.roles import ControllerSpec, PolicySpec, RolloutSpec, TrainerSpec
from rljob_api.status import RLJobStatus
from rljob_api.task import TaskSpec
from rljob_api.topology import TOPOLOGY_RULES, Topology

QueueName = Annotated[
    str,
    Text(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        expected="the name of a Kueue LocalQueue: lower-case letters, digits, - and .",
        max_length=63,  # it becomes the value of a label
    ),
]


class RLJobSpec(ApiModel):
    """What is trained, on what, how, and where. `model`, `task` and `algorithm.steps` make a job."""

    topology: Topology = Field(default="Colocated", json_schema_extra=immutable())
    """Colocated: policy and rollout take turns on the same GPUs. Disaggregated: rollouts have GPUs of their own."""

    model: ModelSpec = Field(json_schema_extra=immutable())
    """The model that is trained."""

    task: TaskSpec = Field(json_schema_extra=immutable())
    """What the model is asked, and what its answers are worth."""

    algorithm: AlgorithmSpec
    """How the policy learns."""

    policy: PolicySpec = PolicySpec()
    """The pods that train the model."""

    rollout: RolloutSpec = Field(
        default=RolloutSpec(), json_schema_extra=immutable_presence("replicas", "gpusPerReplica")
    )
    """The engines that generate."""

    controller: ControllerSpec = ControllerSpec()
    """The pod that drives the job."""

    memory: MemorySettings = MemorySettings()
    """Every setting that bears on memory."""

    recovery: RecoverySpec = RecoverySpec()
    """How often a job that failed is helped up again."""

    checkpoint: CheckpointSpec = Field(
        default=CheckpointSpec(), json_schema_extra=immutable_presence("volume", "size", "storageClassName")
    )
    """When checkpoints are made, and where they are kept."""

    fault_injection: FaultInjection = FaultInjection()
    """Failures on purpose, off by default."""

    trainer: TrainerSpec | None = None
    """Another trainer than RLJob's own."""

    suspend: bool = False
    """Ends the pods after a checkpoint; set back to false, the job goes on where it was."""

    queue_name: QueueName | None = None
    """Kueue LocalQueue that the job waits in."""

    gang: Literal["Auto", "Volcano", "Native", "Disabled"] = "Auto"
    """Who sees to it that the job's pods start together or not at all. Auto: what the cluster has."""

    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """The job is deleted so long after its end. Absent: it is kept."""

    active_deadline_seconds: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """The job is stopped as failed when it has run so long."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *TOPOLOGY_RULES,
        Rule(
            cel="!has(self.queueName) || self.gang != 'Volcano'",
            holds=lambda spec: spec.queue_name is None or spec.gang != "Volcano",
            field="gang",
            message="Volcano cannot schedule what Kueue admits: write gang: Auto, or remove queueName",
        ),
    )


class RLJob(ApiModel):
    """A reinforcement learning job: the model is trained on the task, and survives running out of memory."""

    api_version: Literal["rljob.dev/v1alpha1"] = "rljob.dev/v1alpha1"
    """Version of this API."""

    kind: Literal["RLJob"] = "RLJob"
    """RLJob."""

    metadata: Metadata
    """Name, namespace, labels and annotations."""

    spec: RLJobSpec
    """What is trained, on what, how, and where."""

    status: RLJobStatus | None = None
    """How the job fares; written by the operator alone."""
