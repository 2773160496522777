"""A module of the task's functions limits the staleness of rollouts with MAX_STALENESS."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput
from rljob_trainer.tasks.staleness import require_staleness_allowed

MODULES = {
    "forbids": "MAX_STALENESS = 0\n",
    "allows": "MAX_STALENESS = 1\n",
    "declares_nothing": "",
    "declares_text": "MAX_STALENESS = '0'\n",
    "declares_truth": "MAX_STALENESS = False\n",
    "declares_less": "MAX_STALENESS = -1\n",
    "fails": "1 / 0\n",
}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    path = list(sys.path)
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(f"{source}def items(): ...\ndef reward(answer, record): ...\n")
    yield tmp_path
    sys.path[:] = path
    for name in MODULES:
        sys.modules.pop(name, None)


def job(name: str, reward: str | None, **algorithm: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "model": {"uri": "hf://org/name"},
            "topology": "Disaggregated",
            "task": {"name": name} | ({"reward": reward} if reward else {}),
            "algorithm": {"steps": 1, "maxStaleness": 1} | algorithm,
        }
    )


@pytest.mark.parametrize(
    ("name", "reward", "by"),
    [
        ("forbids:items", "declares_nothing:reward", "forbids (task.name)"),
        ("allows:items", "forbids:reward", "forbids (task.reward)"),
        ("digits", "forbids:reward", "forbids (task.reward)"),
    ],
)
def test_each_module_of_the_task_can_forbid_stale_rollouts(directory: Path, name: str, reward: str, by: str) -> None:
    with pytest.raises(BadInput) as raised:
        require_staleness_allowed(job(name, reward), directory)
    assert str(raised.value) == (
        f"algorithm.maxStaleness: expected at most 0, because {by} sets MAX_STALENESS = 0, found 1; "
        "write algorithm: {maxStaleness: 0}, or change the task"
    )
    require_staleness_allowed(job(name, reward, maxStaleness=0), directory)


def test_the_advice_for_partial_rollouts_is_a_valid_manifest(directory: Path) -> None:
    with pytest.raises(BadInput, match=r"write algorithm: {maxStaleness: 0, partialRolloutPrompts: 0}, or"):
        require_staleness_allowed(job("digits", "forbids:reward", partialRolloutPrompts=2), directory)


@pytest.mark.parametrize(
    ("name", "reward"),
    [("digits", None), ("allows:items", "allows:reward"), ("declares_nothing:items", "allows:reward")],
)
def test_other_tasks_allow_stale_rollouts(directory: Path, name: str, reward: str | None) -> None:
    require_staleness_allowed(job(name, reward), directory)


@pytest.mark.parametrize("module", ["declares_text", "declares_truth", "declares_less"])
def test_a_limit_that_is_no_whole_number_is_refused(directory: Path, module: str) -> None:
    with pytest.raises(BadInput, match=f"expected MAX_STALENESS in {module} to be a whole number from 0, found "):
        require_staleness_allowed(job("digits", f"{module}:reward"), directory)


def test_without_stale_rollouts_no_module_is_imported(directory: Path) -> None:
    require_staleness_allowed(job("digits", "fails:reward", maxStaleness=0), directory)
    with pytest.raises(BadInput, match="cannot import fails"):
        require_staleness_allowed(job("digits", "fails:reward"), directory)
