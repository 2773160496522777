"""Every setting can be given on the command line and by the environment, and is in the manual; so is every metric."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rljob_operator import cli
from rljob_operator.metrics import REGISTRY
from rljob_operator.settings import OperatorSettings

MANUAL = Path(__file__).parents[4] / "docs" / "operator.md"
REQUIRED = {"RLJOB_OPERATOR_TRAINER_IMAGE": "trainer:1", "RLJOB_OPERATOR_TRAINER_TORCH_VERSION": "2.8.0"}
OF_THE_LOGS = {"log_format", "log_level"}


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that the operator would run with."""
    found: list[OperatorSettings] = []

    def run(settings: OperatorSettings, *_: Any) -> int:
        found.append(settings)
        return 0

    monkeypatch.setattr(cli, "_run", run)

    def settings_of(*arguments: str, **environment: str) -> OperatorSettings:
        done = CliRunner().invoke(cli.app, ["run", *arguments], env=REQUIRED | environment)
        assert done.exit_code == 0, done.output
        return found.pop()

    return settings_of


def test_every_setting_is_an_option() -> None:
    options = set(inspect.signature(cli.run).parameters)
    assert options - OF_THE_LOGS == {field.name for field in fields(OperatorSettings)}


def test_without_options_the_settings_are_the_defaults(settings_of: Any) -> None:
    given = settings_of()
    for field in fields(OperatorSettings):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if default is not MISSING:
            assert getattr(given, field.name) == default, field.name


def test_options_and_environment(settings_of: Any) -> None:
    given = settings_of(
        "--namespaces", "a", "--namespaces", "b", "--pod-labels", "team=rl", "--no-label-nodes",
        RLJOB_OPERATOR_CHECKPOINT_CLAIM_BYTES="5Gi",
        RLJOB_OPERATOR_IMAGE_PULL_SECRETS="one two",
        RLJOB_OPERATOR_METRICS_AUTH="false",
    )  # fmt: skip
    assert given.namespaces == ("a", "b")
    assert given.pod_labels == {"team": "rl"}
    assert given.checkpoint_claim_bytes == 5 << 30
    assert given.image_pull_secrets == ("one", "two")
    assert (given.label_nodes, given.metrics_auth) == (False, False)


def test_nodes_that_are_not_watched_are_not_labelled(settings_of: Any) -> None:
    assert settings_of("--no-watch-nodes").label_nodes is False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--pod-labels", "team"], "expected NAME=VALUE, found 'team'"),
        (["--shared-memory-bytes", "much"], "expected a quantity of bytes"),
        (["--reconcile-workers", "0"], "greater than or equal to 1"),
        (["--trainer-torch-version", "2.4"], "expected torch 2.6 or newer, found 2.4"),
    ],
)
def test_a_wrong_option_is_told_and_ends_with_2(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(cli.app, ["run", *arguments], env=REQUIRED | {"COLUMNS": "200"})
    assert done.exit_code == 2
    assert sentence in done.output


def test_every_option_is_in_the_manual() -> None:
    manual = MANUAL.read_text()
    for name in inspect.signature(cli.run).parameters:
        assert f"`--{name.replace('_', '-')}`" in manual, name


def test_every_metric_is_in_the_manual_and_no_other() -> None:
    described = {
        line.split("`")[1] for line in MANUAL.read_text().splitlines() if line.startswith("| `rljob_operator_")
    }
    counted = {"counter": "_total"}
    existing = {
        f"{family.name}{counted.get(family.type, '')}"
        for family in REGISTRY.collect()
        if family.name.startswith("rljob_operator_")
    }
    assert described == existing
