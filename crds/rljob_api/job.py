"""RLJob: a reinforcement learning job."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import InitErrorDetails

from rljob_api.algorithm import STEPS_OF_SCHEDULE, AlgorithmSpec
from rljob_api.api_model import ApiModel, Rule, Text, immutable, immutable_presence
from rljob_api.checkpoint import CheckpointSpec
from rljob_api.environment import Variable, VariablesSource
from rljob_api.evaluation import EvaluationSpec
from rljob_api.fault_injection import FaultInjection
from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_api.metadata import Metadata
from rljob_api.model import ModelSpec
from rljob_api.recovery import GROWTH_RULES, RecoverySpec
from rljob_api.roles import ControllerSpec, PolicySpec, RolloutSpec, TrainerSpec
from rljob_api.status import RLJobStatus
from rljob_api.task import TaskSpec
from rljob_api.topology import TOPOLOGY_RULES, Topology, worker_pods
from rljob_api.tracking import TRACKERS, SamplesSpec, TrackerSpec

QueueName = Annotated[
    str,
    Text(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        expected="the name of a Kueue LocalQueue: lower-case letters, digits, - and .",
        max_length=63,  # it becomes the value of a label
    ),
]


ManagedBy = Annotated[
    str,
    Text(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$",
        expected="the name of a controller with its domain, such as kueue.x-k8s.io/multikueue",
        max_length=63,
    ),
]

MANAGED_BY_OPERATOR = "rljob.dev/operator"
"""Value of `managedBy` that has the same effect as none."""

_TRANSITIONS: dict[str, Any] = {
    "x-kubernetes-validations": [
        STEPS_OF_SCHEDULE,
        {
            "rule": "self.task.overlongPrompts != 'Skip' || "
            "self.algorithm.maxPromptTokens == oldSelf.algorithm.maxPromptTokens",
            "message": "cannot change while task.overlongPrompts is Skip, since other prompts would be skipped: "
            "delete the job and create it again",
            "fieldPath": ".algorithm.maxPromptTokens",
        },
        {
            "rule": "has(self.trainer) == has(oldSelf.trainer)",
            "message": "cannot be added or removed after the job is created: create another job",
            "fieldPath": ".trainer",
        },
        {
            "rule": "has(self.managedBy) == has(oldSelf.managedBy)",
            "message": "cannot be added or removed after the job is created: delete the job and create it again",
            "fieldPath": ".managedBy",
        },
        {
            "rule": "(has(self.evaluation) ? self.evaluation.heldOut : 0) == "
            "(has(oldSelf.evaluation) ? oldSelf.evaluation.heldOut : 0)",
            "message": "heldOut cannot change after the job is created, since other prompts would be trained on: "
            "delete the job and create it again",
            "fieldPath": ".evaluation",
        },
    ]
}


_TASK_FIELDS = ("args", "reward", "rewards", "files", "answer", "systemPrompt", "chatTemplateArgs")


class RLJobSpec(ApiModel):
    """Specification of the job. Only `model`, `task` and `algorithm.steps` are required."""

    topology: Topology = Field(default="Colocated", json_schema_extra=immutable())
    """Colocated: policy and rollout take turns on the same GPUs. Disaggregated: rollouts have their own GPUs."""

    model: ModelSpec = Field(json_schema_extra=immutable())
    """The model to train."""

    task: TaskSpec = Field(json_schema_extra=immutable_presence(*_TASK_FIELDS))
    """The task: prompts and rewards."""

    algorithm: AlgorithmSpec = Field(
        json_schema_extra=immutable_presence(
            *("loss", "advantage", "clipLow", "clipHigh", "dualClip", "scaleAdvantages", "lossAggregation"),
            *("dynamicSampling", "overlongPenalty"),
        )
    )
    """The training algorithm and its hyperparameters."""

    evaluation: EvaluationSpec | None = None
    """Evaluation of the policy during training. Absent: none."""

    policy: PolicySpec = Field(default=PolicySpec(), json_schema_extra=immutable_presence("lora"))
    """The pods that train the model."""

    rollout: RolloutSpec = Field(
        default=RolloutSpec(),
        json_schema_extra=immutable_presence("replicas", "gpusPerReplica", "tensorParallelSize"),
    )
    """The engines that generate responses."""

    controller: ControllerSpec = ControllerSpec()
    """The pod that drives the job."""

    memory: MemorySettings = MemorySettings()
    """Settings that affect memory. Auto leaves a setting to the memory plan, which may change it after an out-of-memory
    failure. Any other value pins the setting."""

    recovery: RecoverySpec = RecoverySpec()
    """Limits on automatic recovery. RLJob counts adjustments (changes of the memory plan) and restarts (with the same
    plan) separately."""

    checkpoint: CheckpointSpec = Field(
        default=CheckpointSpec(), json_schema_extra=immutable_presence("volume", "size", "storageClassName")
    )
    """Interval and storage of checkpoints."""

    tracking: Annotated[list[TrackerSpec], Field(max_length=4)] | None = Field(
        default=None,
        description="Experiment trackers to which the run reports, each at most once: "
        f"{', '.join(kind.title for kind in TRACKERS.values())}.",
    )

    samples: SamplesSpec = SamplesSpec()
    """Prompts and responses that the run keeps in samples.jsonl, with their rewards."""

    env: Annotated[list[Variable], Field(max_length=64)] | None = None
    """Environment variables of the job's containers, as in a Kubernetes container: HF_TOKEN from a Secret, for example.
    rljob run ignores them: set them in the shell. Changes take effect with the next attempt."""

    env_from: Annotated[list[VariablesSource], Field(max_length=16)] | None = None
    """Secrets and ConfigMaps whose keys become environment variables, as in a Kubernetes container."""

    fault_injection: FaultInjection = FaultInjection()
    """Faults to inject on purpose, to test recovery. Off by default."""

    trainer: TrainerSpec | None = None
    """Another trainer, to run instead of RLJob's own."""

    suspend: bool = False
    """If true, the job saves a checkpoint and its pods terminate. Set it back to false to resume the job."""

    retry: int = Field(default=0, ge=0, le=2**31 - 1)
    """Raise it to resume a failed job without another change of its spec. Any change except to suspend and
    ttlSecondsAfterFinished also resumes a failed job."""

    queue_name: QueueName | None = None
    """Kueue LocalQueue that admits the job. Absent: that of the label kueue.x-k8s.io/queue-name; without it, the job
    does not use Kueue."""

    managed_by: ManagedBy | None = Field(default=None, json_schema_extra=immutable())
    """Controller that reconciles the job, such as kueue.x-k8s.io/multikueue, which runs it in another cluster. Absent,
    or rljob.dev/operator: RLJob's operator."""

    gang: Literal["Auto", "Volcano", "Native", "Disabled"] = "Auto"
    """Gang scheduling, which places all pods of the job or none. Volcano: by Volcano. Native: by the default scheduler;
    the operator releases a partly placed job. Auto: Volcano if it is installed, otherwise Native. Disabled: pods are
    placed one by one."""

    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Seconds after which a finished job is deleted. Absent: the job is kept."""

    active_deadline_seconds: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Seconds after which a running job is stopped and marked as failed. Absent: no limit."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *TOPOLOGY_RULES,
        *GROWTH_RULES,
        Rule(
            cel="self.rollout.quantization == 'Disabled' || self.policy.gpusPerReplica > 0",
            holds=lambda spec: spec.rollout.quantization == "Disabled" or spec.policy.gpus_per_replica > 0,
            field="rollout.quantization",
            message="requires GPUs, because vLLM on the CPU has no 8-bit floating point: write Disabled, or "
            "gpusPerReplica: 1",
        ),
        Rule(
            cel="self.rollout.kvCacheDtype == 'Auto' || self.policy.gpusPerReplica > 0",
            holds=lambda spec: spec.rollout.kv_cache_dtype == "Auto" or spec.policy.gpus_per_replica > 0,
            field="rollout.kvCacheDtype",
            message="requires GPUs, because vLLM on the CPU has no 8-bit floating point: write Auto, or "
            "gpusPerReplica: 1",
        ),
        Rule(
            cel="(self.rollout.quantization == 'Disabled' && self.rollout.kvCacheDtype == 'Auto') || "
            "self.algorithm.importanceSampling.mode != 'Disabled'",
            holds=lambda spec: (
                (spec.rollout.quantization == "Disabled" and spec.rollout.kv_cache_dtype == "Auto")
                or spec.algorithm.importance_sampling.mode != "Disabled"
            ),
            field="algorithm",
            message="importanceSampling.mode must not be Disabled if the engine computes in 8 bits, because its token "
            "probabilities differ from the policy's: write Truncate, or remove rollout.quantization and kvCacheDtype",
        ),
        Rule(
            cel="self.algorithm.maxStaleness == 0 || self.algorithm.importanceSampling.mode != 'Disabled'",
            holds=lambda spec: (
                spec.algorithm.max_staleness == 0 or spec.algorithm.importance_sampling.mode != "Disabled"
            ),
            field="algorithm",
            message="importanceSampling.mode must not be Disabled with maxStaleness: 1, because the responses come "
            "from the weights of the previous step: write Truncate, or maxStaleness: 0",
        ),
        Rule(
            cel="self.tracking.all(one, self.tracking.exists_one(other, other.name == one.name))",
            holds=lambda spec: len({one.name for one in spec.tracking or ()}) == len(spec.tracking or ()),
            field="tracking",
            message="has a tracker twice: write each at most once",
        ),
        Rule(
            cel="!has(self.queueName) || self.gang != 'Volcano'",
            holds=lambda spec: spec.queue_name is None or spec.gang != "Volcano",
            field="gang",
            message="Volcano cannot schedule jobs that Kueue admits: write gang: Auto, or remove queueName",
        ),
        Rule(
            cel="!has(self.evaluation) || !has(self.evaluation.everySteps) || "
            "self.evaluation.everySteps <= self.algorithm.steps",
            holds=lambda spec: spec.evaluation is None or (spec.evaluation.every_steps or 0) <= spec.algorithm.steps,
            field="evaluation.everySteps",
            message="must be at most algorithm.steps: lower it, or remove it to evaluate only at start and end",
        ),
        Rule(
            cel="!has(self.evaluation) || !has(self.evaluation.maxResponseTokens) || "
            "self.evaluation.maxResponseTokens <= self.algorithm.maxResponseTokens",
            holds=lambda spec: (
                spec.evaluation is None
                or (spec.evaluation.max_response_tokens or 0) <= spec.algorithm.max_response_tokens
            ),
            field="evaluation.maxResponseTokens",
            message="must be at most algorithm.maxResponseTokens, for which the engines have room: lower it",
        ),
    )

    @property
    def uses_hub(self) -> bool:
        """True if the job may download its model or its data set from the Hugging Face hub."""
        return self.model.uri.startswith("hf://") or self.task.name == "dataset"

    def further_problems(self) -> list[InitErrorDetails]:
        if self.evaluation is None or self.evaluation.args is None:
            return []
        problems = self.evaluation.task_of(self.task).further_problems()
        return [{**problem, "loc": ("evaluation", *problem["loc"])} for problem in problems]


class RLJob(ApiModel):
    """A reinforcement learning job. It trains a model on a task, and recovers from out-of-memory failures."""

    api_version: Literal["rljob.dev/v1alpha1"] = "rljob.dev/v1alpha1"
    """Version of this API."""

    kind: Literal["RLJob"] = "RLJob"
    """RLJob."""

    metadata: Metadata
    """Name, namespace, labels and annotations."""

    spec: RLJobSpec = Field(json_schema_extra=_TRANSITIONS)
    """Specification of the job."""

    status: RLJobStatus | None = None
    """Status of the job. Only the operator writes it."""


# A job whose policy has grown: `policyGpus` of the memory plan replaces `policy.replicas`.
#
# Only the number of pods grows. Each pod keeps its GPUs, its template and its resources, so it still fits on the nodes
# of the job.


def grown_spec(spec: RLJobSpec, plan: MemoryPlan | None) -> RLJobSpec:
    """The spec with the size of the policy in `plan`; `spec` itself if `plan` is None or does not change the size."""
    if plan is None or plan.policy_gpus is None:
        return spec
    policy = worker_pods(spec)[0]
    if plan.policy_gpus == policy.processes:
        return spec
    replicas = max(plan.policy_gpus // policy.processes_per_pod, 1)
    return spec.model_copy(update={"policy": spec.policy.model_copy(update={"replicas": replicas})})


def grown_job(job: RLJob, plan: MemoryPlan | None) -> RLJob:
    """The job with the size of the policy in `plan`, see `grown_spec`."""
    spec = grown_spec(job.spec, plan)
    return job if spec is job.spec else job.model_copy(update={"spec": spec})
