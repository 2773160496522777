"""docs/pods.md describes the pods as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import yaml

from rljob_api.manifest import load_manifest
from rljob_api.status import Role
from rljob_memory.allocator import allocator_environment
from rljob_operator.objects.placement import GPU_NODE_LABELS
from rljob_operator.objects.pods import CPUS_PER_GPU, MEMORY_GIB_PER_GPU, REQUESTS
from tests.unit.operator.objects.builders import container_of, job, mounts_of, objects, pod_of

PAGE = (Path(__file__).parents[4] / "docs" / "pods.md").read_text()


def rows(first_column: str) -> Iterator[list[str]]:
    """The cells of the rows of the table whose heading begins with `first_column`."""
    (table,) = re.findall(rf"^\| {re.escape(first_column)} \|.*\n\|---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for line in table.splitlines():
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_names_every_label_that_keeps_the_controller_away() -> None:
    documented = [(label, set_by) for label, set_by in rows("label | set by")]
    assert documented == [
        (f"`{label.key}`" + (f" (`{label.value}`)" if label.value else ""), label.set_by) for label in GPU_NODE_LABELS
    ]


def test_the_page_names_every_variable_of_the_allocator() -> None:
    documented = [(role, variable.strip("`"), value.strip("`")) for role, variable, value, _ in rows("role")]
    assert documented == [
        (role, variable, value)
        for role in get_args(Role)
        for variable, value in allocator_environment(role, "2.13.0").items()
    ]


def test_the_page_tells_the_default_requests() -> None:
    documented = {role: (cpu, memory) for role, cpu, memory, _ in rows("pod | CPU")}
    assert documented == {
        "controller": (REQUESTS["cpu"], REQUESTS["memory"]),
        "worker": (
            f"{CPUS_PER_GPU} a GPU, at least {CPUS_PER_GPU}",
            f"{MEMORY_GIB_PER_GPU}Gi a GPU, at least {MEMORY_GIB_PER_GPU}Gi",
        ),
    }


def test_the_page_names_every_mount() -> None:
    documented = {path.strip("` ") for paths, _, _ in rows("path") for path in paths.split(",")}
    task = {"name": "digits", "files": {"configMap": "my-task"}}
    models = {"uri": "oci://r/m:1"}, {"uri": "hf://org/name", "cache": {"persistentVolumeClaim": "models"}}
    pods = [pod_of(objects(job(model=model, task=task)), "controller") for model in models]
    assert documented == {mount["mountPath"] for pod in pods for mount in mounts_of(pod).values()}


def test_every_example_of_the_page_makes_pods(tmp_path: Path) -> None:
    spec = {"model": {"uri": "hf://org/name"}, "task": {"name": "digits"}, "algorithm": {"steps": 3}}
    spec["policy"] = {"replicas": 2}
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "example"}}
    images = []
    for example in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**manifest, "spec": spec | yaml.safe_load(example)["spec"]}))
        images.append(container_of(pod_of(objects(load_manifest(tmp_path / "job.yaml")), "policy", 1))["image"])
    assert "registry.example.com/my-trainer:2" in images
