"""The command `rljob-operator`: settings, help, logs, and the metrics that the manual lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_operator import cli
from rljob_operator.metrics import REGISTRY
from rljob_operator.options import options
from rljob_operator.runtime.job_queue import JobQueue
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


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ([], {}, {}),
        (["--namespaces", "a", "--namespaces", "b"], {}, {"namespaces": ("a", "b")}),
        (["--pod-labels", "team=rl", "--no-label-nodes"], {}, {"pod_labels": {"team": "rl"}, "label_nodes": False}),
        (["--no-watch-nodes"], {}, {"watch_nodes": False, "label_nodes": False}),
        ([], {"POD_LABELS": "team=rl cost=7"}, {"pod_labels": {"team": "rl", "cost": "7"}}),
        ([], {"CHECKPOINT_CLAIM_BYTES": "5Gi"}, {"checkpoint_claim_bytes": 5 << 30}),
        ([], {"IMAGE_PULL_SECRETS": "one two"}, {"image_pull_secrets": ("one", "two")}),
        ([], {"METRICS_AUTH": "false", "CHECKPOINT_STORAGE_CLASS": ""}, {"metrics_auth": False}),
        (["--lease-name", "option"], {"LEASE_NAME": "variable"}, {"lease_name": "option"}),
    ],
)
def test_settings_come_from_options_before_variables_before_defaults(
    settings_of: Any, arguments: list[str], environment: dict[str, str], expected: dict[str, Any]
) -> None:
    found = settings_of(*arguments, **{f"RLJOB_OPERATOR_{name}": value for name, value in environment.items()})
    defaults = OperatorSettings(trainer_image="trainer:1", trainer_torch_version="2.8.0")
    assert found.model_dump() == defaults.model_dump() | expected


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
    with pytest.raises(SystemExit):
        cli.main(["run"])
    assert "--trainer-image is required: set it, or RLJOB_OPERATOR_TRAINER_IMAGE" in capsys.readouterr().err


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
    JobQueue()  # its metrics are registered with the module
    counted = {"counter": "_total"}
    existing = {
        f"{family.name}{counted.get(family.type, '')}"
        for family in REGISTRY.collect()
        if family.name.startswith(("rljob_operator_", "workqueue_"))
    }
    assert described == existing


PROGRAM = """
import sys, structlog
from rljob_operator.cli import set_up_logs
set_up_logs(sys.argv[1], "info")
def deeper(value): return deeper({"a": value})
try:
    deeper(1)
except RecursionError:
    import time
    began = time.process_time()
    structlog.get_logger("rljob_operator").exception("too deep")
    assert time.process_time() - began < 3, time.process_time() - began
"""


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_the_traceback_of_a_recursion_does_not_block_the_process(log_format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert "too deep" in done.stderr
    assert "RecursionError" in done.stderr
