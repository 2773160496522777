"""Fields of a valid job that a command, a trainer or a device does not read.

`rljob report` and `rljob diagnose` read no manifest, and `rljob fetch` reads the volume of the job in the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from rljob_api.job import RLJobSpec
from rljob_api.manifest.problems import schema_of
from rljob_api.manifest.yaml_document import Path

Device = Literal["cpu", "cuda"]

_MACHINE = "rljob run cannot add memory to this machine"
_SCHEDULING = "rljob run ignores it: it is for pods on a cluster"
_OUTPUT = "rljob run ignores it and writes to its output directory (--output DIR)"
_BY_HAND = "rljob run ignores it: stop or start the command"
_IN_FILE = "file"
_NO_PODS = "has no effect: all processes of another trainer are in the policy's pods"
_NO_CONTROLLER = "has no effect: a job with another trainer has no controller"
_PLAN = "plan"

READERS: tuple[tuple[str, str, str], ...] = (
    ("topology", "", ""),
    ("model.uri model.dtype", "", _IN_FILE),
    ("model.cache", "rljob run ignores it: the environment variable HF_HOME names the cache", ""),
    ("task.name task.args task.reward task.rewards task.answer task.systemPrompt", "", _IN_FILE),
    ("task.promptTemplate task.chatTemplate task.chatTemplateArgs task.overlongPrompts", "", _IN_FILE),
    ("task.onRewardError task.rewardTimeoutSeconds", "", _IN_FILE),
    ("task.files", "rljob run ignores it and looks next to the manifest", ""),
    ("algorithm.name algorithm.steps algorithm.promptsPerStep algorithm.groupSize algorithm.seed", "", _IN_FILE),
    ("algorithm.loss algorithm.advantage algorithm.maskTruncated algorithm.importanceSampling.level", "", _IN_FILE),
    ("algorithm.learningRateSchedule.name algorithm.learningRateSchedule.args", "", _IN_FILE),
    ("algorithm.updatesPerStep algorithm.learningRate algorithm.warmupSteps algorithm.adamBeta1", "", _IN_FILE),
    ("algorithm.adamBeta2 algorithm.weightDecay algorithm.maxGradNorm algorithm.clipLow", "", _IN_FILE),
    ("algorithm.clipHigh algorithm.dualClip algorithm.klCoefficient algorithm.entropyCoefficient", "", _IN_FILE),
    ("algorithm.scaleAdvantages algorithm.lossAggregation algorithm.importanceSampling.mode", "", _IN_FILE),
    ("algorithm.importanceSampling.cap algorithm.maxStaleness algorithm.partialRolloutPrompts", "", _IN_FILE),
    ("algorithm.temperature algorithm.maxPromptTokens algorithm.maxResponseTokens", "", _IN_FILE),
    ("algorithm.dynamicSampling.maxRounds algorithm.overlongPenalty.bufferTokens", "", _IN_FILE),
    ("algorithm.overlongPenalty.factor algorithm.topP algorithm.topK algorithm.minP algorithm.stop", "", _IN_FILE),
    ("algorithm.ignoreEndOfSequence policy.lora policy.optimizer.moments", "", _IN_FILE),
    ("evaluation.heldOut evaluation.args evaluation.task evaluation.prompts evaluation.everySteps", "", _IN_FILE),
    ("evaluation.atStart evaluation.atEnd evaluation.samplesPerPrompt evaluation.temperature", "", _IN_FILE),
    ("evaluation.topP evaluation.maxResponseTokens evaluation.successReward", "", _IN_FILE),
    ("evaluation.bestMetric evaluation.keepBest", "", _IN_FILE),
    ("policy.replicas policy.gpusPerReplica", "", ""),
    ("policy.template", _SCHEDULING, ""),
    ("rollout.tensorParallelSize", "", ""),
    ("rollout.replicas rollout.gpusPerReplica", "", _NO_PODS),
    ("rollout.template", _SCHEDULING, _NO_PODS),
    ("rollout.maxConcurrentSequences rollout.quantization rollout.kvCacheDtype rollout.engineArgs", "", _IN_FILE),
    ("controller.requireGpuFreeNode controller.template", _SCHEDULING, _NO_CONTROLLER),
    ("memory.mode recovery.maxAdjustments recovery.maxRestarts recovery.maxGpus", "", ""),
    ("memory.emptyCache memory.expandableSegments memory.rolloutSleep memory.kvCache", "", _PLAN),
    ("memory.microBatchTokens memory.logprobChunkTokens memory.activationCheckpointing", "", _PLAN),
    ("memory.optimizerOffload memory.policyOffload memory.syncBucketSize", "", _PLAN),
    ("memory.detachMetrics memory.weightExport", "", _PLAN),
    ("memory.admission", _SCHEDULING, "has no effect: the memory of another trainer is not predicted"),
    ("recovery.phaseDeadlineSeconds", "", "has no effect: another trainer reports no phases"),
    ("recovery.maxStepsWithoutLearning", "", "has no effect: another trainer reports no rewards of groups"),
    ("recovery.maxHostMemory recovery.maxSharedMemory", _MACHINE, ""),
    ("checkpoint.everySteps checkpoint.keep checkpoint.acceptChangedInputs", "", _IN_FILE),
    ("checkpoint.exportEverySteps checkpoint.keepExports", "", _IN_FILE),
    ("checkpoint.volume checkpoint.size checkpoint.storageClassName checkpoint.retain", _OUTPUT, ""),
    (
        "tracking samples.perStep samples.showEverySteps",
        "",
        "has no effect: another trainer reports to trackers itself",
    ),
    ("env envFrom", "rljob run ignores it: set the variables in the shell", ""),
    ("faultInjection.enabled faultInjection.faults", "", "has no effect: only RLJob's own trainer injects faults"),
    ("trainer", "", ""),
    ("suspend retry", _BY_HAND, ""),
    ("queueName gang managedBy", _SCHEDULING, ""),
    ("ttlSecondsAfterFinished activeDeadlineSeconds", _SCHEDULING, ""),
)
"""Fields of the spec, the reason why `rljob run` does not read them, and the reason why another trainer does not.

An empty reason: the field is read. `file`: another trainer reads it if it opens RLJOB_MANIFEST. `plan`: another trainer
reads it if `trainer.supportedSettings` or its adapter contains it. RLJob's own trainer in pods reads all fields.
`rljob run` refuses `trainer`."""


class Unread(NamedTuple):
    """A field of a manifest that has no effect, or none for `rljob run`."""

    severity: Literal["warning", "note"]
    field: Path
    message: str


class _Ineffective(NamedTuple):
    fields: str
    applies: Callable[[RLJobSpec, Device], bool]
    """True if the fields have no effect on this job."""
    reason: str
    severity: Literal["warning", "note"] = "warning"


def _has_reward_function(spec: RLJobSpec) -> bool:
    return any(reward.source != "task" for reward in spec.task.reward_functions)


def _has_own_algorithm(spec: RLJobSpec) -> bool:
    return spec.algorithm.loss is not None or spec.algorithm.advantage is not None


_INEFFECTIVE = (
    _Ineffective(
        "policy.gpusPerReplica",
        lambda spec, device: device == "cpu" and spec.policy.gpus_per_replica > 0,
        "no GPU is used here: each of them is a rank on the CPU",
        "note",
    ),
    _Ineffective(
        "policy.gpusPerReplica",
        lambda spec, device: device == "cuda" and spec.policy.gpus_per_replica == 0,
        "the GPUs of this machine are used: --device cpu trains on the CPU",
        "note",
    ),
    _Ineffective(
        "memory.emptyCache memory.expandableSegments memory.rolloutSleep memory.policyOffload memory.weightExport",
        lambda spec, device: spec.trainer is None and device == "cpu",
        "has no effect without GPUs",
    ),
    _Ineffective(
        "memory.optimizerOffload",
        lambda spec, device: spec.trainer is None and device == "cpu",
        "has no effect without GPUs: the optimizer's state is in host memory",
    ),
    _Ineffective(
        "memory.policyOffload memory.weightExport",
        lambda spec, _: spec.topology == "Disaggregated",
        "has no effect with topology: Disaggregated, because policy and engine have their own GPUs",
    ),
    _Ineffective(
        "recovery.maxAdjustments recovery.maxGpus recovery.maxHostMemory recovery.maxSharedMemory",
        lambda spec, _: spec.memory.mode == "Disabled",
        "has no effect with memory.mode: Disabled",
    ),
    _Ineffective(
        "algorithm.importanceSampling.cap algorithm.importanceSampling.level",
        lambda spec, _: spec.algorithm.importance_sampling.mode == "Disabled",
        "has no effect with importanceSampling.mode: Disabled",
    ),
    _Ineffective(
        "algorithm.clipLow algorithm.clipHigh algorithm.dualClip",
        lambda spec, _: spec.trainer is None and spec.algorithm.updates_per_step == 1,
        "has no effect with updatesPerStep: 1, because the ratio of probabilities is then 1",
        "note",
    ),
    _Ineffective(
        "task.answer task.onRewardError task.rewardTimeoutSeconds",
        lambda spec, _: spec.task.name == "digits" and not _has_reward_function(spec),
        "has no effect on the reward of digits, which counts tokens: write task.reward, or remove it",
    ),
    _Ineffective(
        "task.files",
        lambda spec, _: spec.trainer is None and not (_has_reward_function(spec) or _has_own_algorithm(spec)),
        "has no effect: this task reads no file and no Python function",
    ),
    _Ineffective(
        "task.chatTemplateArgs",
        lambda spec, _: spec.task.chat_template == "Never",
        "has no effect with chatTemplate: Never",
    ),
    _Ineffective(
        "model.cache",
        lambda spec, _: not spec.uses_hub and not (spec.model.cache and spec.model.cache.compiled),
        "has no effect: only hf:// models and data sets of the hub are downloaded",
    ),
    _Ineffective(
        "gang",
        lambda spec, _: spec.queue_name is not None,
        "has no effect with queueName: Kueue admits all pods of the job at once",
    ),
)


def unread_fields(spec: RLJobSpec, written: dict[str, Any], device: Device | None = None) -> Iterator[Unread]:
    """The fields of `spec` that are not read although the manifest, `written`, sets them to a value other than the
    default. `device` is that of `rljob run`; None: that of the job's pods."""
    device = device or ("cuda" if spec.policy.gpus_per_replica else "cpu")
    reported: set[str] = set()
    for fields, applies, reason, severity in _INEFFECTIVE:
        for field in fields.split():
            if field not in reported and _is_set(field, written) and applies(spec, device):
                reported.add(field)
                yield Unread(severity, _path(field), reason)
    for fields, run_reason, trainer_reason in READERS:
        for field in fields.split():
            if field in reported or not _is_set(field, written):
                continue
            if spec.trainer is None and run_reason:
                yield Unread("note", _path(field), run_reason)
            elif spec.trainer is not None and (reason := _reason_unread(field, trainer_reason, spec)):
                yield Unread("warning", _path(field), reason)


def _reason_unread(field: str, reason: str, spec: RLJobSpec) -> str:
    """Reason why another trainer does not read the field; empty if it does, or may."""
    assert spec.trainer is not None
    if reason == _PLAN:
        setting = field.rpartition(".")[2]
        return "" if setting in spec.trainer.changeable_settings else _not_in_plan(setting)
    return "" if reason == _IN_FILE else reason


def _not_in_plan(setting: str) -> str:
    enum = schema_of("trainer.supportedSettings").get("items", {}).get("enum", [])
    if setting in enum:
        return f"has no effect: add {setting} to trainer.supportedSettings if the trainer reads it, or remove it"
    return "has no effect on another trainer: remove it"


def _is_set(field: str, written: Any) -> bool:
    """True if the manifest sets `field` to a value other than the default."""
    for part in field.split("."):
        written = written.get(part) if isinstance(written, dict) else None
    return written is not None and written != schema_of(field).get("default")


def _path(field: str) -> Path:
    return ("spec", *field.split("."))
