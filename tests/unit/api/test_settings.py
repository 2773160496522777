"""Fields of a manifest that the command line sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.job import RLJob
from rljob_api.manifest import ManifestError, only_job
from rljob_api.manifest.yaml_document import read_documents, yaml_text

MANIFEST = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {uri: hf://org/name}
  task: {name: "tasks:items", reward: "rewards:exact", args: {levels: [1, 2]}}
  algorithm: {steps: 3, learningRate: 010}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    return path


def loaded(manifest: Path, *settings: str) -> RLJob:
    return only_job(manifest, ["algorithm.learningRate=2e-5", *settings]).load()


@pytest.mark.parametrize(
    ("setting", "field", "expected"),
    [
        ("algorithm.steps=10", "algorithm.steps", 10),
        ("spec.algorithm.steps=10", "algorithm.steps", 10),
        ("algorithm.learningRate=2e-5", "algorithm.learning_rate", 2e-5),
        ("algorithm.steps=", "algorithm.warmup_steps", 0),
        ("memory.kvCache=8Gi", "memory.kv_cache", 8 << 30),
        ("memory={kvCache: 8Gi}", "memory.kv_cache", 8 << 30),
        ("rollout.engineArgs.block_size=32", "rollout.engine_args", {"block_size": 32}),
        ("task.args.levels[1]=9", "task.args", {"levels": [1, 9]}),
        ("task.args=null", "task.args", {}),
        ("task.reward=rewards:other", "task.reward", "rewards:other"),
        ("model.uri='random://qwen3?hidden=64'", "model.uri", "random://qwen3?hidden=64"),
    ],
)
def test_a_setting_is_typed_as_yaml(setting: str, field: str, expected: Any, manifest: Path) -> None:
    more = ["algorithm.steps=5"] if setting == "algorithm.steps=" else []
    value: Any = loaded(manifest, setting, *more).spec
    for name in field.split("."):
        value = getattr(value, name)
    assert value == expected


def test_the_last_setting_of_a_field_counts_and_the_name_can_be_set(manifest: Path) -> None:
    job = loaded(manifest, "algorithm.steps=10", "algorithm.steps=20", "metadata.name=other")
    assert (job.spec.algorithm.steps, job.metadata.name) == (20, "other")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("algorithm.steps=abc", 'spec.algorithm.steps: expected a whole number from 1 to 10000000, found "abc"'),
        ("algorithm.stpes=3", "spec.algorithm.stpes: unknown field; did you mean steps?"),
        ("algorthm.steps=3", "spec.algorthm: unknown field; did you mean algorithm?"),
        ("algorithm.num_generations=3", "spec.algorithm.num_generations: unknown field; did you mean groupSize?"),
        ("algorithm.steps=010", "spec.algorithm.steps: YAML reads 010 as the octal number 8: write 10"),
        ("algorithm={groupSize: 4}", "spec.algorithm.steps: required"),
        ("algorithm.steps", "expected a path and a value, such as algorithm.steps=10"),
        ("=3", "expected a path and a value"),
        ("policy.template.spec.nodeSelector.a/b=c", "names with other characters are written in the object"),
        ("task.args.levels[2]=3", "expected an item 2 in levels, found 2 items, counted from 0"),
        ("task.args.levels.first=3", "expected an object in levels, found a list: write the number of an item"),
        ("algorithm[0]=3", "expected an item 0 in algorithm, found no list"),
        ("model.uri.name=3", "expected an object in uri, found 'hf://org/name'"),
        ("task.args={a: [1}", "the value is not YAML: "),
        ("task.args={a: 1}\n---\nb: 2", "expected one value, found several YAML documents"),
    ],
)
def test_a_wrong_setting_is_named_with_its_correction(setting: str, expected: str, manifest: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        loaded(manifest, setting)
    [problem] = caught.value.problems
    assert str(problem).startswith(f"--set {setting}: {expected}"[: len(f"--set {setting}: ")])
    assert expected in str(problem)
    assert problem.line is None


def test_problems_of_the_file_keep_their_lines(manifest: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        only_job(manifest, ["algorithm.steps=10"]).load()
    assert str(caught.value).startswith(f"{manifest}:7: spec.algorithm.learningRate: YAML reads 010")


def test_objects_that_an_alias_shares_are_changed_apart(manifest: Path) -> None:
    roles = ("policy: {template: &pod {spec: {nodeSelector: {a: b}}}}", "rollout: {template: *pod}")
    manifest.write_text(MANIFEST + "".join(f"  {line}\n" for line in ("topology: Disaggregated", *roles)))
    spec = only_job(manifest, ["policy.template.spec.nodeSelector.a=c"]).document.data["spec"]
    found = [spec[role]["template"]["spec"]["nodeSelector"]["a"] for role in ("policy", "rollout")]
    assert found == ["c", "b"]


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])) | st.sampled_from(
    ["1e6", "2e-5", "on", "no", "010", "0o17", "12:30", "2026-01-01", "null", "~", "1_000", ".5", "- a", "a: b"]
)
values = st.recursive(
    texts | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | st.booleans(),
    lambda children: st.lists(children, min_size=1) | st.dictionaries(texts, children, min_size=1),
    max_leaves=12,
)


@given(values)
def test_written_yaml_is_read_as_the_same_values(value: Any) -> None:
    assert [document.data for document in read_documents(yaml_text({"value": value}))] == [{"value": value}]
