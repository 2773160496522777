"""The numbers and settings that trackers show, from the records of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.job import RLJob
from rljob_client.run_directory.records import EvaluationRecord, StepRecord
from rljob_client.run_directory.summary import Summary
from rljob_memory.sizes import GIB

_MAY_CONTAIN_SECRETS = {
    "tracking": True,
    "env": True,
    "env_from": True,
    "policy": {"template"},
    "rollout": {"template", "engine_args"},
    "controller": True,
    "checkpoint": {"volume"},
}


def run_config(job: RLJob) -> dict[str, Any]:
    """The settings of the manifest, without those that may contain secrets."""
    return job.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=_MAY_CONTAIN_SECRETS)


def record_values(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """The values of a step or an evaluation, by the names in the trackers."""
    return evaluation_values(record) if isinstance(record, EvaluationRecord) else step_values(record)


def step_values(record: StepRecord) -> dict[str, float]:
    """Metrics have the names of the ledger. Memory is in GiB: the highest peak of the role."""
    return {
        **{f"reward/{name}": value for name, value in record.reward.model_dump().items()},
        **{f"response/{name}": value for name, value in record.response.model_dump().items()},
        **{f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()},
        "seconds/step": record.total_seconds,
        "step_tokens": record.tokens,
        "tokens_per_second": record.tokens_per_second,
        **{f"memory/{role}": peak / GIB for role, peak in record.peak_memory_bytes.items()},
        **record.metrics,
    }


def evaluation_values(record: EvaluationRecord) -> dict[str, float]:
    return {f"evaluation/{name}": value for name, value in record.metrics.items()} | {
        "evaluation/seconds": record.seconds
    }


def summary_values(summary: Summary) -> dict[str, Any]:
    """The numbers and texts of `summary.json`, those of objects under names such as `peak_memory/policy/gib`."""
    return dict(_flat(summary.model_dump(mode="json", exclude={"plan_changes"})))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", value
