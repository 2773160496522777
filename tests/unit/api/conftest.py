"""Manifests for the tests of the API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rljob_api.job import RLJob
from rljob_api.manifest import ManifestError, Problem, load_manifest


@pytest.fixture
def smallest() -> dict[str, Any]:
    """The smallest manifest: model, task and steps make a job."""
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "smallest"},
        "spec": {"model": {"uri": "hf://org/name"}, "task": {"name": "digits"}, "algorithm": {"steps": 3}},
    }


@pytest.fixture
def problems_of(tmp_path: Path) -> Callable[[str], list[Problem]]:
    """Writes a manifest and returns the problems that loading it finds."""

    def problems_of(text: str) -> list[Problem]:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        with pytest.raises(ManifestError) as caught:
            load_manifest(path)
        return caught.value.problems

    return problems_of


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], RLJob]:
    def load(text: str) -> RLJob:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return load_manifest(path)

    return load
