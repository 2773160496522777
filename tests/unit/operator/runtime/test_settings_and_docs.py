"""Every setting is an option, an environment variable and a row of the manual; every metric is in the manual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_operator import cli
from rljob_operator.metrics import REGISTRY
from rljob_operator.options import options
from rljob_operator.runtime.work_queue import WorkQueue
from rljob_operator.settings import OperatorSettings

MANUAL = Path(__file__).parents[4] / "docs" / "operator.md"
REQUIRED = {"RLJOB_OPERATOR_TRAINER_IMAGE": "trainer:1", "RLJOB_OPERATOR_TRAINER_TORCH_VERSION": "2.8.0"}


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that the operator would run with."""
    found: list[OperatorSettings] = []

    def run(settings: OperatorSettings) -> int:
        found.append(settings)
        return 0

    monkeypatch.setattr(cli, "_run", run)

    def settings_of(*arguments: str, **environment: str) -> OperatorSettings:
        for name, value in (REQUIRED | environment).items():
            monkeypatch.setenv(name, value)
        assert cli.main(["run", *arguments]) == 0
        return found.pop()

    return settings_of


def test_without_options_the_settings_are_the_defaults(settings_of: Any) -> None:
    expected = OperatorSettings(trainer_image="trainer:1", trainer_torch_version="2.8.0")
    assert settings_of().model_dump() == expected.model_dump()


def test_options_and_environment(settings_of: Any) -> None:
    given = settings_of(
        "--namespaces", "a", "--namespaces", "b", "--pod-labels", "team=rl", "--no-label-nodes",
        RLJOB_OPERATOR_CHECKPOINT_CLAIM_BYTES="5Gi",
        RLJOB_OPERATOR_IMAGE_PULL_SECRETS="one two",
        RLJOB_OPERATOR_METRICS_AUTH="false",
        RLJOB_OPERATOR_CHECKPOINT_STORAGE_CLASS="",
    )  # fmt: skip
    assert given.namespaces == ("a", "b")
    assert given.pod_labels == {"team": "rl"}
    assert given.checkpoint_claim_bytes == 5 << 30
    assert given.checkpoint_storage_class is None
    assert given.image_pull_secrets == ("one", "two")
    assert (given.label_nodes, given.metrics_auth) == (False, False)


def test_labels_in_the_environment_are_separated_by_spaces(settings_of: Any) -> None:
    assert settings_of(RLJOB_OPERATOR_POD_LABELS="team=rl cost=7").pod_labels == {"team": "rl", "cost": "7"}


def test_options_take_precedence_over_the_environment(settings_of: Any) -> None:
    given = settings_of(
        "--lease-name", "option", RLJOB_OPERATOR_LEASE_NAME="variable", RLJOB_OPERATOR_LOG_LEVEL="debug"
    )
    assert (given.lease_name, given.log_level) == ("option", "debug")


def test_nodes_that_are_not_watched_are_not_labelled(settings_of: Any) -> None:
    assert settings_of("--no-watch-nodes").label_nodes is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pod-labels", "team"], "--pod-labels: expected NAME=VALUE, found 'team'"),
        (["--shared-memory-bytes", "much"], "--shared-memory-bytes: expected a quantity of bytes"),
        (["--reconcile-workers", "0"], "--reconcile-workers: input should be greater than or equal to 1, found '0'"),
        (["--start-timeout-seconds", "inf"], "--start-timeout-seconds: input should be a finite number, found 'inf'"),
        (["--start-timeout-seconds", "nan"], "--start-timeout-seconds: input should be a finite number, found 'nan'"),
        (["--trainer-torch-version", "2.4"], "expected torch 2.6 or newer, found 2.4"),
        (["--log-level", "loud"], "--log-level: input should be 'debug', 'info', 'warning' or 'error', found 'loud'"),
        (["--lease", "x"], "unrecognized arguments: --lease x"),
    ],
)
def test_an_invalid_option_exits_with_2(
    settings_of: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        settings_of(*arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_setting_names_option_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run"])
    assert stopped.value.code == 2
    message = "--trainer-image is required: set it, or RLJOB_OPERATOR_TRAINER_IMAGE"
    assert message in capsys.readouterr().err


def test_help_lists_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", "--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in options():
        assert f"{option.flag} " in shown or f"{option.flag}," in shown
        assert not option.default or f"Default: {option.default}." in shown


def test_every_metric_is_in_the_manual_and_no_other() -> None:
    described = {
        line.split("`")[1]
        for line in MANUAL.read_text().splitlines()
        if line.startswith(("| `rljob_operator_", "| `workqueue_"))
    }
    WorkQueue()  # its metrics are registered with the module
    counted = {"counter": "_total"}
    existing = {
        f"{family.name}{counted.get(family.type, '')}"
        for family in REGISTRY.collect()
        if family.name.startswith(("rljob_operator_", "workqueue_"))
    }
    assert described == existing
