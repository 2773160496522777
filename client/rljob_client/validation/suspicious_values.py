"""Findings about valid manifests: values that are probably a mistake. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from rljob_api.environment import is_secret_name
from rljob_api.job import RLJob, RLJobSpec
from rljob_api.manifest import Severity
from rljob_api.manifest.problems import schema_of
from rljob_api.manifest.yaml_document import Path
from rljob_memory.model_shape import ModelShape
from rljob_memory.pod_memory import low_limits, predicted_budget, small_claim, summary

_MIB = 1 << 20
_AMOUNTS = (
    ("memory", "kvCache"),
    ("memory", "syncBucketSize"),
    ("recovery", "maxHostMemory"),
    ("recovery", "maxSharedMemory"),
    ("checkpoint", "size"),
)
_HIGH_LEARNING_RATE = 1e-3
_SMALLEST_PRETRAINED = 50_000_000
"""Parameters. Smaller models are for tests, and often trained from random weights."""

_LORA_FACTOR = 10
"""Adapters are trained with about ten times the learning rate of all weights."""

_POD_FIELDS = frozenset(
    """
    activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy enableServiceLinks
    ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname hostnameOverride
    imagePullSecrets initContainers nodeName nodeSelector os overhead preemptionPolicy priority priorityClassName
    readinessGates resourceClaims resources restartPolicy runtimeClassName schedulerName schedulingGates
    schedulingGroup securityContext serviceAccount serviceAccountName setHostnameAsFQDN shareProcessNamespace
    subdomain terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes workloadRef
    """.split()  # noqa: SIM905
)
"""Fields of a PodSpec, Kubernetes 1.36."""


@dataclass(frozen=True, slots=True)
class FieldFinding:
    """A finding about a field of a valid manifest."""

    severity: Severity
    """error: the job would fail. warning: probably a mistake, or not checked although it could be. note: cannot be
    checked on this machine, or a prediction."""

    field: Path
    """Path of the field, such as ("spec", "model", "uri")."""

    message: str


def suspicious_values(job: RLJob, data: dict[str, Any]) -> Iterator[FieldFinding]:
    """Warnings about `job`, parsed from `data`."""
    spec = job.spec
    yield from _absent_values(data["spec"])
    yield from _small_amounts(data["spec"])
    yield from _batches(spec)
    yield from _secrets_in_plain_text(spec)
    yield from _unknown_pod_fields(data["spec"])
    algorithm = spec.algorithm
    if not spec.model.uri.startswith(("random://", "file://")) and (message := high_learning_rate(spec)) is not None:
        yield _warning(("algorithm", "learningRate"), message)  # a model in a file may be one for tests
    if "everySteps" in (data["spec"].get("checkpoint") or {}) and spec.checkpoint.every_steps > algorithm.steps > 1:
        message = f"is more than algorithm.steps ({algorithm.steps}): no checkpoint is written before the end"
        yield _warning(("checkpoint", "everySteps"), message)
    if "gpu_memory_utilization" in spec.rollout.engine_args:
        message = "has no effect on the KV cache, whose size is memory.kvCache: write that, or leave it Auto"
        yield _warning(("rollout", "engineArgs", "gpu_memory_utilization"), message)
    if "emptyDir" in (spec.checkpoint.volume or {}):
        message = "an emptyDir is deleted with its pod: a restarted job begins at step 1; name a volume that pods share"
        yield _warning(("checkpoint", "volume"), message)


def high_learning_rate(spec: RLJobSpec) -> str | None:
    """The warning about a learning rate that is too high for a pretrained model; None if it is not."""
    rate, is_lora = spec.algorithm.learning_rate, spec.policy.lora is not None
    if rate <= _HIGH_LEARNING_RATE * (_LORA_FACTOR if is_lora else 1):
        return None
    return f"{rate:g} is high for {'adapters of ' if is_lora else ''}a pretrained model; 1e-6 is the default"


def memory_findings(spec: RLJobSpec, shape: ModelShape, device: Literal["cpu", "cuda"]) -> Iterator[FieldFinding]:
    """The prediction for the job's pods, and the limits and sizes that are below it."""
    prediction = predicted_budget(spec, shape, device)
    if shape.parameters >= _SMALLEST_PRETRAINED:  # a smaller job fits everywhere
        place = "a GPU" if device == "cuda" else "CPUs"
        yield FieldFinding("note", ("spec", "policy"), f"predicted on {place}: {summary(prediction, spec, shape)}")
        if (message := high_learning_rate(spec)) is not None:
            yield _warning(("algorithm", "learningRate"), message)
    for role, message in low_limits(spec, prediction):
        yield _warning((role, "template"), message)
    if (too_small := small_claim(spec, shape, prediction)) is not None:
        yield _warning(("checkpoint", "size"), too_small)


def _warning(field: Path, message: str) -> FieldFinding:
    return FieldFinding("warning", ("spec", *field), message)


def _absent_values(data: Any, path: Path = ()) -> Iterator[FieldFinding]:
    """Fields of the API that are written without a value."""
    for name, value in data.items() if isinstance(data, dict) else ():
        schema = schema_of(".".join(map(str, (*path, name))))
        if value is None and schema:
            default = f": the default {schema['default']} applies" if "default" in schema else ""
            yield _warning((*path, name), f"has no value{default}; write a value, or remove the field")
        elif schema.get("properties"):
            yield from _absent_values(value, (*path, name))


def _small_amounts(spec: dict[str, Any]) -> Iterator[FieldFinding]:
    for field in _AMOUNTS:
        found = str((spec.get(field[0]) or {}).get(field[1]))
        if re.fullmatch(r"[0-9.]+", found) and float(found) < _MIB:
            yield _warning(field, f"{found} without a unit is a number of bytes; did you mean {found}Gi?")


def _batches(spec: RLJobSpec) -> Iterator[FieldFinding]:
    algorithm, micro_batch = spec.algorithm, spec.memory.micro_batch_tokens
    sequence = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    step = algorithm.prompts_per_step * algorithm.group_size
    if isinstance(micro_batch, int):
        most = -(-step // algorithm.updates_per_step) * sequence
        if micro_batch > most:
            message = f"{micro_batch} tokens are more than an update can have ({most}): it has no effect"
            yield _warning(("memory", "microBatchTokens"), message)
        elif micro_batch < sequence:
            message = (
                f"{micro_batch} is less than a prompt and a response can have ({sequence} tokens); a longer sequence "
                "gets its own micro-batch"
            )
            yield _warning(("memory", "microBatchTokens"), message)
    if step % algorithm.updates_per_step:
        parts = f"{step // algorithm.updates_per_step} or {step // algorithm.updates_per_step + 1}"
        divisor = max(n for n in range(1, algorithm.updates_per_step) if step % n == 0)
        message = (
            f"the {step} responses of a step (promptsPerStep x groupSize) are split into unequal parts of {parts}: "
            f"write a divisor of {step}, such as {divisor}"
        )
        yield _warning(("algorithm", "updatesPerStep"), message)
    sequences = spec.rollout.max_concurrent_sequences
    if isinstance(sequences, int) and sequences > step:
        message = f"{sequences} are more than a step has ({step} responses): it has no effect"
        yield _warning(("rollout", "maxConcurrentSequences"), message)


def _secrets_in_plain_text(spec: RLJobSpec) -> Iterator[FieldFinding]:
    for index, variable in enumerate(spec.env or ()):
        if variable.value and is_secret_name(variable.name):
            message = (
                f"{variable.name} is stored in plain text in the job and its ConfigMap; "
                "write valueFrom: {secretKeyRef: {name: …, key: …}}"
            )
            yield _warning(("env", index, "value"), message)


def _unknown_pod_fields(spec: dict[str, Any]) -> Iterator[FieldFinding]:
    for role in ("controller", "policy", "rollout"):
        pod = ((spec.get(role) or {}).get("template") or {}).get("spec") or {}
        for name in pod:
            if name not in _POD_FIELDS:
                close = get_close_matches(name, _POD_FIELDS, n=1)
                hint = f"did you mean {close[0]}?" if close else "remove it"
                yield _warning((role, "template", "spec", name), f"is not a field of a Kubernetes PodSpec: {hint}")
