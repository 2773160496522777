"""The manifest that the pods read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.job import RLJob
from rljob_api.manifest import load_manifest
from rljob_operator.objects.strategic_merge import InvalidTemplate
from rljob_testing.repository import EXAMPLES
from tests.unit.operator.objects.builders import NAMESPACE, container_of, job, objects, of_kind, pod_of

PAGE = EXAMPLES.parent / "docs" / "pods.md"


def manifest_of(given: RLJob) -> str:
    return str(of_kind("ConfigMap", objects(given))["data"]["job.yaml"])


def read_back(given: RLJob, directory: Path) -> RLJob:
    path = directory / "job.yaml"
    path.write_text(manifest_of(given), encoding="utf-8")
    return load_manifest(path)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_pods_read_what_the_user_wrote(example: Path, tmp_path: Path) -> None:
    given = load_manifest(example)
    found = read_back(given, tmp_path)
    assert found.spec == given.spec
    assert (found.metadata.name, found.metadata.namespace) == (given.metadata.name, NAMESPACE)


def test_every_example_of_the_page_makes_pods(tmp_path: Path) -> None:
    images = []
    for example in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL):
        spec = {"policy": {"replicas": 2}} | yaml.safe_load(example)["spec"]
        found = read_back(job(**spec), tmp_path)
        images.append(container_of(pod_of(objects(found), "policy", 1))["image"])
    assert "registry.example.com/my-trainer:2" in images


TEXTS = ("1e5", "2026-01-01", "on", "null", "", " x ", "a: b", "#", "\x85\u2028\x7f", "🎲", "\t\n")
texts = st.sampled_from(TEXTS) | st.text()


@settings(deadline=None, max_examples=15)
@given(st.dictionaries(st.text(max_size=5), texts | st.floats(allow_nan=False, allow_infinity=False)))
def test_any_arguments_of_a_task_survive(
    tmp_path_factory: pytest.TempPathFactory, args: dict[str, str | float]
) -> None:
    args = {**dict(zip(TEXTS, TEXTS, strict=True)), **args}
    given = job(task={"name": "my.tasks:items", "args": args, "reward": "my.tasks:reward"})
    assert read_back(given, tmp_path_factory.mktemp("job")).spec == given.spec


def test_nulls_of_a_template_reach_the_pods_and_labels_do_not(tmp_path: Path) -> None:
    policy = {"template": {"spec": {"nodeSelector": None, "affinity": {"nodeAffinity": None}}}}
    found = read_back(job(metadata={"labels": {"a": "b"}}, policy=policy), tmp_path)
    assert found.status is None
    assert found.metadata.labels == {}
    assert found.spec.policy.template.spec["affinity"] == {"nodeAffinity": None}


def test_a_deeply_nested_or_large_manifest_fits_or_is_refused() -> None:
    deep: object = [0] * 100_000
    for _ in range(150):
        deep = [deep]
    assert len(manifest_of(job(rollout={"engineArgs": {"hf_overrides": {"a": deep}}}))) < 400_000
    assert manifest_of(job()).startswith('{\n  "apiVersion"'), "users read it, too"
    large = job(rollout={"engineArgs": {"hf_overrides": {"a": "x" * 800_000}}})
    with pytest.raises(InvalidTemplate, match="spec: expected at most 700 KiB of JSON, found 784 KiB; shorten"):
        objects(large)
