"""The chart, rendered by Helm."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_cluster.binaries import binary_directory
from rljob_testing.patience import PATIENCE_SECONDS

CHART = Path(__file__).parents[3] / "charts" / "rljob-operator"

Object = dict[str, Any]
Render = Callable[..., list[Object]]
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Runs helm with arguments and returns its output."""
    built = binary_directory() / "helm"
    program = str(built) if built.exists() else shutil.which("helm")
    if program is None:
        pytest.skip(f"no helm in {built.parent} nor on the PATH; `make control-plane` builds it")

    def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS)

    return helm


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """Objects that `helm template` renders with some values, including hooks."""

    @cache
    def rendered(values: str, api_versions: str) -> str:
        served = ("--api-versions", api_versions) if api_versions else ()
        result = helm("template", "rljob", str(CHART), "--namespace", "rljob-system", "--set-json", values, *served)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def render(*, api_versions: str = "", **values: Any) -> list[Object]:
        assignments = ",".join(f"{name}={json.dumps(value)}" for name, value in values.items())
        documents = yaml.load_all(rendered(assignments, api_versions), Loader=yaml.CSafeLoader)
        return [document for document in documents if document]

    return render


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def only_object(objects: list[Object], kind: str, name: str = "") -> Object:
    """The only object of a kind that is not a hook. `name`: the end of its name."""
    [found] = [one for one in of_kind(objects, kind) if not is_hook(one) and one["metadata"]["name"].endswith(name)]
    return found


def is_hook(found: Object) -> bool:
    return "helm.sh/hook" in found["metadata"].get("annotations", {})


def pod_templates(objects: list[Object]) -> list[Object]:
    return [found["spec"]["template"] for kind in ("Deployment", "Job") for found in of_kind(objects, kind)]


def operator_container(objects: list[Object]) -> Object:
    [container] = only_object(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    found: Object = container
    return found


def environment(objects: list[Object]) -> dict[str, str]:
    """Environment variables of the operator."""
    return {
        variable["name"]: variable.get("value", str(variable.get("valueFrom")))
        for variable in operator_container(objects)["env"]
    }
