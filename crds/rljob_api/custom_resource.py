"""CustomResourceDefinitions of RLJob, StepReport and MemoryProfile."""

from __future__ import annotations

from typing import Any

from rljob_api.job import RLJob
from rljob_api.memory_profile import MemoryProfile
from rljob_api.metadata import GROUP, VERSION, job_name_rules
from rljob_api.schemas import structural_schema
from rljob_api.step_report import StepReport

CustomResourceDefinition = dict[str, Any]


def rljob_definition() -> CustomResourceDefinition:
    schema = structural_schema(RLJob)
    schema["x-kubernetes-validations"] = job_name_rules()
    return _definition(
        kind="RLJob",
        names={"shortNames": ["rlj"], "categories": ["all"]},
        schema=schema,
        columns=[
            _column("Phase", "string", ".status.display.phase", "Phase of the job."),
            _column("Step", "string", ".status.display.step", "Committed steps and all steps."),
            _column("Reward", "string", ".status.display.reward", "Mean reward of the last committed step."),
            _column("Peak", "string", ".status.display.peak", "Peak reserved memory of the fullest GPU."),
            _column("Headroom", "string", ".status.display.headroom", "Free memory of the fullest GPU at its peak."),
            _column("Adjustments", "integer", ".status.adjustments", "Counted changes of the memory plan."),
            _column("Last-OOM", "string", ".status.lastOutOfMemory.diagnosis.class", "Class of the latest failure."),
            _column("Age", "date", ".metadata.creationTimestamp"),
            _column("Restarts", "integer", ".status.restarts", "Counted restarts.", wide=True),
            _column("Evaluation", "string", ".status.display.evaluation", "Latest score, and the best.", wide=True),
            _column("Ready", "string", _ready("status"), "The job runs, or is complete.", wide=True),
            _column("Message", "string", _ready("message"), "Message of the condition Ready.", wide=True),
        ],
    )


def _ready(field: str) -> str:
    return f'.status.conditions[?(@.type=="Ready")].{field}'


def step_report_definition() -> CustomResourceDefinition:
    return _definition(
        kind="StepReport",
        names={},
        schema=structural_schema(StepReport),
        columns=[
            _column("Step", "integer", ".status.step", "Number of committed steps."),
            _column("Phase", "string", ".status.phase", "Phase of the current step."),
            _column("Reward", "number", ".status.reward", "Mean reward of the last committed step."),
            _column("Tokens/s", "number", ".status.tokensPerSecond", "Tokens per second of the last committed step."),
            _column("Updated", "date", ".status.updateTime"),
        ],
    )


def memory_profile_definition() -> CustomResourceDefinition:
    definition = _definition(
        kind="MemoryProfile",
        names={},
        schema=structural_schema(MemoryProfile),
        columns=[
            _column("Model", "string", ".spec.model", "URI of the model."),
            _column("GPU", "string", ".spec.gpu", "Type of the GPUs."),
            _column("GPUs", "integer", ".spec.gpus", "Number of GPUs."),
            _column("Peak", "string", ".status.display.peak", "Largest peak of reserved GPU memory, or host memory."),
            _column("Changes", "string", ".status.display.changes", "Settings that the next job starts with."),
            _column("Jobs", "integer", ".status.jobs", "Completed jobs that were recorded."),
            _column("Used", "date", ".status.lastUsedTime", "Time of the last record."),
            _column("Age", "date", ".metadata.creationTimestamp"),
        ],
    )
    del definition["spec"]["versions"][0]["subresources"]  # the operator writes all of it in one request
    return definition


def _definition(
    kind: str,
    names: dict[str, Any],
    schema: dict[str, Any],
    columns: list[dict[str, str | int]],
) -> CustomResourceDefinition:
    plural = f"{kind.lower()}s"
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(), **names},
            "versions": [version],
        },
    }


def _column(name: str, type_: str, path: str, description: str = "", *, wide: bool = False) -> dict[str, str | int]:
    """A column of `kubectl get`; a wide one is shown by `kubectl get -o wide` only."""
    column: dict[str, str | int] = {"name": name, "type": type_, "jsonPath": path}
    return column | ({"description": description} if description else {}) | ({"priority": 1} if wide else {})
