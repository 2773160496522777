"""The ConfigMap that a job's pods read: the manifest, the memory plan, the environment of each role's processes."""

from __future__ import annotations

import json
import re

from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest, object_metadata

MANIFEST_KEY = "job.yaml"
ATTEMPT_KEY = "attempt"
MEMORY_PLAN_KEY = "memory-plan.json"
PLAN_CHANGES_KEY = "plan-changes.json"
POLICY_ENVIRONMENT_KEY = "policy-environment.json"
ROLLOUT_ENVIRONMENT_KEY = "rollout-environment.json"

# YAML refuses these, or reads them as line ends, where JSON takes them as they are.
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def build_config_map(
    attempt: JobAttempt, policy_environment: dict[str, str] | None, rollout_environment: dict[str, str] | None
) -> Manifest:
    """Without a memory plan while there is none; the environments are None for another trainer than RLJob's own."""
    data = {MANIFEST_KEY: manifest_text(attempt), ATTEMPT_KEY: str(attempt.number)}
    if attempt.plan is not None:
        data[MEMORY_PLAN_KEY] = attempt.plan.model_dump_json(by_alias=True)
    if attempt.plan_changes:
        changes = [change.model_dump(mode="json", by_alias=True, exclude_none=True) for change in attempt.plan_changes]
        data[PLAN_CHANGES_KEY] = json.dumps(changes)
    if policy_environment is not None:
        data[POLICY_ENVIRONMENT_KEY] = json.dumps(policy_environment)
    if rollout_environment is not None:
        data[ROLLOUT_ENVIRONMENT_KEY] = json.dumps(rollout_environment)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_metadata(attempt, names.config_map_name(attempt.name)),
        "data": data,
    }


def manifest_text(attempt: JobAttempt) -> str:
    """The job as `rljob_api.manifest.load_manifest` reads it, without status. JSON, which is YAML as well: all strings
    are quoted, so none can be taken for something else."""
    job = attempt.job
    manifest = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": {"name": attempt.name, "namespace": attempt.namespace},
        "spec": job.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"
