"""The numbers and settings that trackers show, from the records of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api.job import RLJob
from rljob_client.run_directory.records import EvaluationRecord, StepRecord
from rljob_client.run_directory.summary import Summary
from rljob_memory.sizes import GIB

_MAY_CONTAIN_SECRETS: dict[str, Any] = {
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
    """The values of a step or an evaluation, by the names in the trackers.

    Metrics of a step have the names of the ledger. Memory is in GiB: the highest peak of the role's processes.
    """
    if isinstance(record, EvaluationRecord):
        values = {"seconds": record.seconds, **record.metrics}
        return {f"evaluation/{name}": value for name, value in values.items()}
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


def summary_values(summary: Summary) -> dict[str, Any]:
    """The numbers and texts of `summary.json`, those of objects under names such as `peak_memory/policy/gib`."""
    return dict(flat(summary.model_dump(mode="json", exclude={"plan_changes"}), "/"))


def flat(values: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested objects, by joined names. Those that are None are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f"{prefix}{name}{separator}")
        elif value is not None:
            yield f"{prefix}{name}", value
