"""An output directory belongs to one job: other moments of the optimizer are refused before anything starts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, get_args

import pytest

from rljob_api.job import RLJob
from rljob_api.optimizer import OptimizerSpec
from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.ledger import Ledger
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.runtime.job_run import DEFAULTS_OF_IDENTITY, identity
from tests.unit.ledger.samples import step_record

_ALL_MOMENTS: tuple[str, ...] = get_args(OptimizerSpec.model_fields["moments"].annotation)
OTHERS = sorted(set(_ALL_MOMENTS) - {"float32"})


def job(**policy: Any) -> RLJob:
    spec = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 3}, "policy": policy}
    return RLJob.model_validate({"metadata": {"name": "a"}, "spec": spec}, by_alias=True, by_name=False)


def opened(path: Path, **policy: Any) -> AbstractContextManager[None]:
    return OutputDirectory(path).open("", identity(job(**policy)), defaults=DEFAULTS_OF_IDENTITY)


def commit_a_step(path: Path, **policy: Any) -> None:
    with opened(path, **policy), Ledger(OutputDirectory(path).ledger) as ledger:
        ledger.begin_attempt(0.0, versions={}, plan={}, processes={})
        ledger.commit(step_record(1))


@pytest.mark.parametrize("moments", OTHERS)
def test_a_run_with_other_moments_is_refused(tmp_path: Path, moments: str) -> None:
    commit_a_step(tmp_path, optimizer={"moments": moments})
    with opened(tmp_path, optimizer={"moments": moments}):
        pass
    expected = rf'policy\.optimizer\.moments: "{moments}" in the run, "float32" in the manifest\nRevert them to resume'
    with pytest.raises(OutputUnavailable, match=expected), opened(tmp_path):
        pass


@pytest.mark.parametrize("moments", OTHERS)
def test_a_directory_without_recorded_moments_has_float32_ones(tmp_path: Path, moments: str) -> None:
    """Earlier versions did not record them."""
    assert "policy" not in identity(job())
    commit_a_step(tmp_path)
    with opened(tmp_path, optimizer={"moments": "float32"}):
        pass
    expected = rf'policy\.optimizer\.moments: "float32" in the run, "{moments}" in the manifest'
    with pytest.raises(OutputUnavailable, match=expected), opened(tmp_path, optimizer={"moments": moments}):
        pass


def test_a_setting_at_its_default_is_none_that_differs(tmp_path: Path) -> None:
    assert {each.partition(".")[0] for each in DEFAULTS_OF_IDENTITY} <= {"algorithm", "policy", "task"}
    values = job().spec.model_dump(mode="json", by_alias=True)
    for name, default in DEFAULTS_OF_IDENTITY.items():
        value: Any = values
        for key in name.split("."):
            value = value[key]
        assert value == default, f"{name}: a directory that lacks it has the API's default"
