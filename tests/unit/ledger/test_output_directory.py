"""An output directory belongs to one job, and to one run at a time."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rljob_api.job import RLJob
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_trainer.errors import OutputUnavailable
from rljob_trainer.ledger.ledger import Ledger
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.runtime.job_run import DEFAULTS_OF_IDENTITY, identity
from tests.unit.ledger.samples import step_record

IDENTITY: dict[str, Any] = {"model": "random://qwen3", "algorithm": {"groupSize": 8, "seed": 0}, "task": {"args": {}}}


@pytest.fixture
def output(tmp_path: Path) -> OutputDirectory:
    return OutputDirectory(tmp_path / "run")


@pytest.fixture
def other_run(output: OutputDirectory) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the directory."""
    holding = (
        "import sys; from pathlib import Path\n"
        "from rljob_trainer.ledger.output_directory import OutputDirectory\n"
        f"with OutputDirectory(Path(sys.argv[1])).open('steps: 10', {IDENTITY!r}): print('held', flush=True); input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holding, output.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_opening_creates_the_layout_and_keeps_the_newest_manifest(output: OutputDirectory) -> None:
    with output.open("steps: 10", IDENTITY | {"betas": (0.9, 0.95)}):
        assert all(each.is_dir() for each in (output.checkpoints, output.journal, output.memory, output.logs))
        (output.journal / "step-000001.npz").write_bytes(b"rollouts of an uncommitted step")
    with output.open("steps: 20", {"betas": [0.9, 0.95]} | dict(reversed(IDENTITY.items()))):
        assert output.manifest.read_text() == "steps: 20"
        assert [path.name for path in output.journal.iterdir()] == ["step-000001.npz"]


def test_a_second_run_is_refused_until_the_first_has_ended(
    output: OutputDirectory, other_run: subprocess.Popen[str]
) -> None:
    expected = rf"in use by another run: process {other_run.pid} on \S+, since .*kill -TERM {other_run.pid}.*--output"
    with pytest.raises(OutputUnavailable, match=expected), output.open("steps: 99", IDENTITY):
        pass
    assert output.manifest.read_text() == "steps: 10", "the running run's manifest stays"
    threading.Timer(0.3, other_run.kill).start()
    with pytest.raises(FileNotFoundError), output.open("steps: 20", IDENTITY, wait_seconds=PATIENCE_SECONDS):
        raise FileNotFoundError
    with output.open("steps: 30", IDENTITY):
        assert output.manifest.read_text() == "steps: 30", "an error in the block releases the lock"


def test_in_a_cluster_the_pod_that_holds_the_directory_is_named(output: OutputDirectory) -> None:
    other = OutputDirectory(output.path)
    expected = r"pod train/digits-controller, since .*kubectl delete pod --namespace train digits-controller"
    with (
        other.open("", IDENTITY, pod="train/digits-controller"),
        pytest.raises(OutputUnavailable, match=expected),
        output.open("", IDENTITY),
    ):
        pass


def test_a_volume_without_locks_is_used_without_one(output: OutputDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with output.open("steps: 10", IDENTITY):
        assert output.manifest.read_text() == "steps: 10"


def test_a_child_that_outlives_the_run_does_not_hold_the_directory(output: OutputDirectory) -> None:
    with output.open("", IDENTITY):
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        with output.open("", IDENTITY):
            pass
    finally:
        child.kill()
        child.wait()


def test_only_a_directory_without_other_files_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(OutputUnavailable, match="found the file"):
        OutputDirectory(tmp_path / "run").open("", IDENTITY).__enter__()
    with pytest.raises(OutputUnavailable, match=r"found run in "):
        OutputDirectory(tmp_path).open("", IDENTITY).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "run").rename(tmp_path / "lost+found")  # a fresh volume
    with OutputDirectory(tmp_path).open("", IDENTITY):
        pass


def test_another_job_is_refused_with_the_fields_that_differ(output: OutputDirectory) -> None:
    commit_a_step(output, IDENTITY)
    other = {"model": "random://llama", "algorithm": {"groupSize": 8}, "task": {"args": {"digits": 2}}}
    with pytest.raises(OutputUnavailable) as raised, output.open("second", other):
        pass
    assert str(raised.value).splitlines()[1:] == [
        "  algorithm.seed: 0 in the run, not set in the manifest",
        '  model: "random://qwen3" in the run, "random://llama" in the manifest',
        "  task.args: {} in the run, not set in the manifest",
        "  task.args.digits: not set in the run, 2 in the manifest",
        "Revert them to resume that run, or give another --output to start over.",
    ]
    assert output.manifest.read_text() == "first"


def test_a_corrected_manifest_starts_over_if_no_step_is_committed(output: OutputDirectory) -> None:
    with output.open("first", IDENTITY), Ledger(output.ledger) as ledger:
        ledger.begin_attempt(0.0, versions={}, plan={}, processes={})
        (output.journal / "step-000001.npz").write_bytes(b"rollouts of the other reward function")
        (output.memory / "policy-0.jsonl").write_bytes(b"{}")
        output.controller_log.write_text("the error")
    corrected = IDENTITY | {"model": "random://llama"}
    with output.open("second", corrected):
        assert output.manifest.read_text() == "second"
        assert not output.ledger.exists()
        assert not list(output.journal.iterdir())
        assert not list(output.memory.iterdir())
        assert output.controller_log.read_text() == "the error"
    commit_a_step(output, corrected)
    with pytest.raises(OutputUnavailable, match="holds the run of another job"), output.open("first", IDENTITY):
        pass


def test_a_changeable_setting_may_change_after_committed_steps(output: OutputDirectory) -> None:
    commit_a_step(output, IDENTITY)
    raised = IDENTITY | {"algorithm": {"groupSize": 16, "seed": 0}}
    with output.open("raised", raised, changeable={"algorithm.groupSize"}):
        assert output.ledger.exists()
    with pytest.raises(OutputUnavailable, match=r"algorithm\.groupSize: 16 in the run"), output.open("first", IDENTITY):
        pass


def test_recorded_inputs_stay_with_the_job_and_go_with_another(output: OutputDirectory) -> None:
    inputs = {"data": {"items": 2, "sha256": "ab"}}
    with output.open("first", IDENTITY):
        assert output.recorded_inputs is None
        output.record_inputs(inputs)
    with output.open("first", IDENTITY):
        assert output.recorded_inputs == inputs
    with output.open("second", IDENTITY | {"model": "random://llama"}):
        assert output.recorded_inputs is None


def commit_a_step(output: OutputDirectory, identity: dict[str, Any]) -> None:
    with output.open("first", identity), Ledger(output.ledger) as ledger:
        ledger.commit(step_record(1))


@pytest.mark.parametrize(
    ("path", "cause"), [("/dev/null/run", "Not a directory"), ("/tmp/" + "long" * 99, "File name too long")]
)
def test_a_directory_that_cannot_exist_is_refused_with_the_cause(path: str, cause: str) -> None:
    with pytest.raises(OutputUnavailable, match=f"{path} could not be written: {cause}"):
        OutputDirectory(Path(path)).open("", IDENTITY).__enter__()


@pytest.mark.parametrize(
    ("put", "cause"),
    [
        (lambda run: run.model.write_text("no directory"), "trained model is written, found a .*file; remove it"),
        (lambda run: run.model.symlink_to(run.path.parent), "trained model is written, found a .*link; remove it"),
        (lambda run: run.summary.mkdir(), r"summary\.json could not be written"),
    ],
)
def test_a_file_that_cannot_be_replaced_is_found_at_the_start(
    output: OutputDirectory, put: Callable[[OutputDirectory], object], cause: str
) -> None:
    with output.open("steps: 10", IDENTITY):
        pass
    put(output)
    with pytest.raises(OutputUnavailable, match=cause), output.open("steps: 10", IDENTITY):
        pass


# --- settings of a job that may not change ---


def job(**policy: Any) -> RLJob:
    spec = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 3}, "policy": policy}
    return RLJob.model_validate({"metadata": {"name": "a"}, "spec": spec}, by_alias=True, by_name=False)


def moments_open(output: OutputDirectory, moments: str | None) -> AbstractContextManager[None]:
    of_job = job(optimizer={"moments": moments}) if moments else job()
    return output.open("", identity(of_job), defaults=DEFAULTS_OF_IDENTITY)


@pytest.mark.parametrize(("before", "after"), [("int8", None), ("int8", "float32"), (None, "int8")])
def test_a_run_with_other_moments_is_refused(output: OutputDirectory, before: str | None, after: str | None) -> None:
    """A directory without recorded moments has float32 ones: earlier versions did not record them."""
    for known in {before, before or "float32"}:
        with moments_open(output, known), Ledger(output.ledger) as ledger:
            if not ledger.steps:
                ledger.commit(step_record(1))
    values = [f'"{moments or "float32"}"' for moments in (before, after)]
    expected = r"policy\.optimizer\.moments: {} in the run, {} in the manifest\nRevert them".format(*values)
    with pytest.raises(OutputUnavailable, match=expected), moments_open(output, after):
        pass


def test_a_setting_that_a_directory_lacks_has_the_default_of_the_api() -> None:
    assert "policy" not in identity(job())
    values = job().spec.model_dump(mode="json", by_alias=True)
    for name, default in DEFAULTS_OF_IDENTITY.items():
        value: Any = values
        for key in name.split("."):
            value = value[key]
        assert value == default, name
