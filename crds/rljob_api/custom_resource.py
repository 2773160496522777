"""CustomResourceDefinitions of RLJob and StepReport."""

from __future__ import annotations

from typing import Any

from rljob_api.job import RLJob
from rljob_api.metadata import job_name_rules
from rljob_api.names import GROUP, VERSION
from rljob_api.step_report import StepReport
from rljob_api.structural_schema import structural_schema

CustomResourceDefinition = dict[str, Any]


def rljob_definition() -> CustomResourceDefinition:
    schema = structural_schema(RLJob)
    schema["x-kubernetes-validations"] = job_name_rules()
    return _definition(
        kind="RLJob",
        names={"shortNames": ["rlj"], "categories": ["all"]},
        schema=schema,
        subresources={"status": {}},
        columns=[
            _column("Phase", "string", ".status.display.phase", "Phase of the job."),
            _column("Step", "string", ".status.display.step", "Committed steps and all steps."),
            _column("Reward", "string", ".status.display.reward", "Mean reward of the last committed step."),
            _column("Peak", "string", ".status.display.peak", "Peak reserved memory of the fullest GPU."),
            _column("Headroom", "string", ".status.display.headroom", "Free memory of the fullest GPU at its peak."),
            _column("Adjustments", "integer", ".status.adjustments", "Counted changes of the memory plan."),
            _column("Last-OOM", "string", ".status.lastOutOfMemory.diagnosis.class", "Class of the latest failure."),
            _column("Age", "date", ".metadata.creationTimestamp"),
        ],
    )


def step_report_definition() -> CustomResourceDefinition:
    return _definition(
        kind="StepReport",
        names={},
        schema=structural_schema(StepReport),
        subresources={},
        columns=[
            _column("Step", "integer", ".step", "Number of committed steps."),
            _column("Phase", "string", ".phase", "Phase of the current step."),
            _column("Reward", "number", ".reward", "Mean reward of the last committed step."),
            _column("Tokens/s", "number", ".tokensPerSecond", "Tokens per second of the last committed step."),
            _column("Updated", "date", ".updateTime"),
        ],
    )


def _definition(
    kind: str,
    names: dict[str, Any],
    schema: dict[str, Any],
    subresources: dict[str, Any],
    columns: list[dict[str, str]],
) -> CustomResourceDefinition:
    plural = f"{kind.lower()}s"
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": columns,
    }
    if subresources:
        version["subresources"] = subresources
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


def _column(name: str, type_: str, path: str, description: str = "") -> dict[str, str]:
    column = {"name": name, "type": type_, "jsonPath": path}
    return column | {"description": description} if description else column
