"""The manifest and the memory plan that the pods read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.job import RLJob
from rljob_api.manifest import load_manifest
from rljob_operator.objects.invalid_template import InvalidTemplate
from tests.unit.operator.objects.builders import NAMESPACE, PLAN, job, objects, of_kind

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))


def read_back(a_job: RLJob, directory: Path) -> RLJob:
    path = directory / "job.yaml"
    path.write_text(of_kind("ConfigMap", objects(a_job))["data"]["job.yaml"], encoding="utf-8")
    return load_manifest(path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_pods_read_what_the_user_wrote(example: Path, tmp_path: Path) -> None:
    a_job = load_manifest(example)
    found = read_back(a_job, tmp_path)
    assert found.spec == a_job.spec
    assert (found.metadata.name, found.metadata.namespace) == (a_job.metadata.name, NAMESPACE)


@pytest.mark.parametrize(
    "text", ["1e5", "2026-01-01", "on", "null", "", " x ", "a: b", "#", "\x85\u2028\x7f", "🎲", "\t\n"]
)
def test_a_text_that_yaml_could_take_for_something_else_stays_a_text(text: str, tmp_path: Path) -> None:
    a_job = job(task={"name": "reasoning-gym", "args": {"dataset": "chain_sum", "x": text}})
    assert read_back(a_job, tmp_path).spec == a_job.spec


@settings(deadline=None)  # files
@given(st.dictionaries(st.text(max_size=5), st.one_of(st.text(), st.floats(allow_nan=False, allow_infinity=False))))
def test_any_arguments_of_a_task_survive(
    tmp_path_factory: pytest.TempPathFactory, args: dict[str, str | float]
) -> None:
    a_job = job(task={"name": "my.tasks:items", "args": args, "reward": "my.tasks:reward"})
    assert read_back(a_job, tmp_path_factory.mktemp("job")).spec == a_job.spec


def test_neither_status_nor_labels_reach_the_pods(tmp_path: Path) -> None:
    a_job = job(metadata={"labels": {"a": "b"}}).model_copy(update={"status": None})
    found = read_back(a_job, tmp_path)
    assert found.status is None
    assert found.metadata.labels == {}


def test_a_null_that_deletes_a_field_of_a_pod_survives(tmp_path: Path) -> None:
    a_job = job(policy={"template": {"spec": {"nodeSelector": None, "affinity": {"nodeAffinity": None}}}})
    assert read_back(a_job, tmp_path).spec.policy.template.spec["affinity"] == {"nodeAffinity": None}


def test_there_is_no_plan_before_there_is_one() -> None:
    settings = of_kind("ConfigMap", objects(job(), attempt=2))["data"]["attempt.json"]
    assert json.loads(settings).keys() == {"attempt", "planChanges", "policyEnvironment", "rolloutEnvironment"}
    assert AttemptSettings.model_validate_json(settings).plan_generation == 1


def test_the_plan_is_handed_over_whole() -> None:
    text = of_kind("ConfigMap", objects(job(), attempt=2, plan=PLAN))["data"]["attempt.json"]
    settings = AttemptSettings.model_validate_json(text)
    assert (settings.attempt, settings.memory_plan) == (2, PLAN)


def test_deep_nesting_makes_the_manifest_no_larger() -> None:
    deep: object = [0] * 100_000
    for _ in range(150):
        deep = [deep]
    a_job = job(rollout={"engineArgs": {"hf_overrides": {"a": deep}}})
    assert len(manifest_of(a_job)) < 400_000
    assert manifest_of(job()).startswith('{\n  "apiVersion"'), "people read it, too"


def test_a_manifest_that_does_not_fit_into_a_config_map_is_refused() -> None:
    a_job = job(rollout={"engineArgs": {"hf_overrides": {"a": "x" * 800_000}}})
    with pytest.raises(InvalidTemplate, match="spec: expected at most 700 KiB of JSON, found 784 KiB; shorten"):
        objects(a_job)


def manifest_of(a_job: RLJob) -> str:
    return str(of_kind("ConfigMap", objects(a_job))["data"]["job.yaml"])
