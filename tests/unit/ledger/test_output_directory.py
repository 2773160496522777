"""An output directory belongs to one job, and to one run at a time."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.job import RLJob
from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.ledger import Ledger
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.runtime.job_run import identity
from tests.unit.ledger.samples import step_record

IDENTITY: dict[str, Any] = {"model": "random://qwen3", "algorithm": {"groupSize": 8, "seed": 0}, "task": {"args": {}}}
OTHER = IDENTITY | {"model": "random://llama"}


@pytest.fixture
def output(tmp_path: Path) -> OutputDirectory:
    return OutputDirectory(tmp_path / "run")


def run_in(output: OutputDirectory, identity: dict[str, Any] = IDENTITY, steps: int = 0, **options: Any) -> None:
    """Open the directory, and commit steps. The manifest is the number of steps."""
    with output.open(str(steps), identity, **options), Ledger(output.ledger) as ledger:
        for _ in range(steps):
            ledger.commit(step_record(ledger.next_step))


def refuse(match: str, output: OutputDirectory, identity: dict[str, Any] = IDENTITY, **options: Any) -> str:
    with pytest.raises(OutputUnavailable, match=match) as refused:
        run_in(output, identity, **options)
    return str(refused.value)


HOLD = f"""
import sys
from pathlib import Path
from rljob_trainer.ledger.output_directory import OutputDirectory
with OutputDirectory(Path(sys.argv[1])).open("first", {IDENTITY!r}):
    print("held", flush=True)
    input()
"""


@pytest.fixture
def other_run(output: OutputDirectory) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the directory."""
    command = [sys.executable, "-c", HOLD, str(output.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
    refuse(rf"by another run: process {other_run.pid} on \S+, since .*kill -TERM {other_run.pid}.*--output", output)
    assert output.manifest.read_text() == "first", "the running run's manifest stays"
    threading.Timer(0.3, other_run.kill).start()
    with pytest.raises(FileNotFoundError), output.open("", IDENTITY, wait_seconds=PATIENCE_SECONDS):
        raise FileNotFoundError
    with output.open("", IDENTITY, pod="train/digits-controller"):  # an error in the block releases the lock
        who = r"pod train/digits-controller, since .*kubectl delete pod --namespace train digits-controller"
        refuse(who, OutputDirectory(output.path))


def test_nothing_but_a_running_run_holds_the_directory(
    output: OutputDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with output.open("", IDENTITY):
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        run_in(output)  # while the child outlives its run
    finally:
        child.kill()
        child.wait()

    def no_locks(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    run_in(output)


def test_only_a_directory_without_other_files_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    refuse("found the file", OutputDirectory(tmp_path / "run"))
    refuse("found run in ", OutputDirectory(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "run").rename(tmp_path / "lost+found")  # a fresh volume
    run_in(OutputDirectory(tmp_path))


def test_another_job_is_refused_with_the_fields_that_differ(output: OutputDirectory) -> None:
    run_in(output, steps=1)
    other = {"model": "random://llama", "algorithm": {"groupSize": 9}, "task": {"args": {"digits": 2}}}
    message = refuse("holds the run of another job", output, other, changeable={"algorithm.groupSize"})
    assert message.splitlines()[1:] == [
        "  algorithm.seed: 0 in the run, the default in the manifest",
        '  model: "random://qwen3" in the run, "random://llama" in the manifest',
        "  task.args: {} in the run, the default in the manifest",
        "  task.args.digits: the default in the run, 2 in the manifest",
        "Revert them to resume that run, or give another --output to start over.",
    ]
    assert output.manifest.read_text() == "1"
    raised = IDENTITY | {"algorithm": {"groupSize": 16, "seed": 0}}
    run_in(output, raised, changeable={"algorithm.groupSize"})
    assert output.ledger.exists()
    refuse(r"algorithm\.groupSize: 16 in the run", output)


def test_a_corrected_manifest_starts_over_if_no_step_is_committed(output: OutputDirectory) -> None:
    inputs = {"data": {"items": 2, "sha256": "ab"}}
    with output.open("first", IDENTITY), Ledger(output.ledger) as ledger:
        ledger.begin_attempt(0.0, versions={}, plan={}, processes={})
        (output.journal / "step-000001.npz").write_bytes(b"rollouts of the other reward function")
        (output.memory / "policy-0.jsonl").write_bytes(b"{}")
        output.controller_log.write_text("the error")
        assert output.recorded_inputs is None
        output.record_inputs(inputs)
    with output.open("first", IDENTITY):
        assert output.recorded_inputs == inputs
    with output.open("second", OTHER):
        assert output.manifest.read_text() == "second"
        assert not output.ledger.exists()
        assert not [*output.journal.iterdir(), *output.memory.iterdir()]
        assert output.controller_log.read_text() == "the error"
        assert output.recorded_inputs is None
    run_in(output, OTHER, steps=1)
    refuse("holds the run of another job", output)


@pytest.mark.parametrize(
    ("path", "cause"), [("/dev/null/run", "Not a directory"), ("/tmp/" + "long" * 99, "File name too long")]
)
def test_a_directory_that_cannot_exist_is_refused_with_the_cause(path: str, cause: str) -> None:
    refuse(f"{path} could not be written: {cause}", OutputDirectory(Path(path)))


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
    run_in(output)
    put(output)
    refuse(cause, output)


# --- settings of a job that may not change ---


def job(**policy: Any) -> RLJob:
    spec = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 3}, "policy": policy}
    return RLJob.model_validate({"metadata": {"name": "a"}, "spec": spec}, by_alias=True, by_name=False)


@pytest.mark.parametrize(("before", "after"), [("int8", None), ("int8", "float32"), (None, "int8")])
def test_a_run_with_other_moments_is_refused(output: OutputDirectory, before: str | None, after: str | None) -> None:
    def of(moments: str | None) -> dict[str, Any]:
        return identity(job(optimizer={"moments": moments}) if moments else job())

    run_in(output, of(before), steps=1)
    run_in(output, of(before or "float32"))
    values = [f'"{moments or "float32"}"' for moments in (before, after)]
    expected = r"policy\.optimizer\.moments: {} in the run, {} in the manifest\nRevert them".format(*values)
    refuse(expected, output, of(after))


def test_a_setting_with_its_default_is_not_recorded() -> None:
    """A later version of the API may have more settings."""
    policy = {"optimizer": {"moments": "float32"}}
    sections = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}}
    assert identity(job()) == identity(job(**policy)) == sections | {"policy": policy}


def algorithm_in_identity(**algorithm: Any) -> dict[str, Any] | None:
    spec = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 3} | algorithm}
    of = identity(RLJob.model_validate({"metadata": {"name": "a"}, "spec": spec}, by_alias=True, by_name=False))
    return of.get("algorithm")


def test_settings_of_the_algorithm_count_unless_they_have_its_default() -> None:
    assert algorithm_in_identity(name="grpo", clipHigh=0.28, lossAggregation="TokenMean") is None
    assert algorithm_in_identity(clipHigh=0.2) == {"clipHigh": 0.2}
    assert algorithm_in_identity(name="dr_grpo", clipHigh=0.2) == {"name": "dr_grpo"}
    assert algorithm_in_identity(loss="own:loss", maskTruncated=True) == {"loss": "own:loss", "maskTruncated": True}


def test_the_number_of_steps_counts_if_the_learning_rate_depends_on_it() -> None:
    assert algorithm_in_identity(learningRateSchedule={"name": "inverse_sqrt"}) == {
        "learningRateSchedule": {"name": "inverse_sqrt"}
    }
    assert algorithm_in_identity(learningRateSchedule={"name": "cosine"}) == {
        "steps": 3,
        "learningRateSchedule": {"name": "cosine"},
    }
