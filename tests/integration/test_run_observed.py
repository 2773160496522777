"""A run with trackers and samples, killed and resumed: all steps are reported, and a silent server delays nothing."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rljob_client.run_directory.samples import read_samples
from rljob_testing.runs import FinishedRun, rljob_run, write_manifest
from tests.integration.compared_runs import MORE_STEPS_THAN_NEEDED, committed_steps, stop_after
from tests.unit.client.test_show_command import show

ENVIRONMENT = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_API_KEY": "0123456789" * 4}


@pytest.fixture(scope="module")
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="module")
def resumed(silent_server: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory = tmp_path_factory.mktemp("observed")

    def manifest(steps: int) -> Path:
        tracking = [
            {"name": "tensorboard"},
            {"name": "wandb"},
            {"name": "mlflow", "args": {"tracking_uri": silent_server}},
        ]
        path = write_manifest(
            directory / f"job-{steps}.yaml",
            algorithm={"steps": steps, "promptsPerStep": 4, "groupSize": 4},
            samples={"perStep": 2, "showEverySteps": 2},
        )
        text = path.read_text().replace("spec:\n", f"spec:\n  tracking: {json.dumps(tracking)}\n", 1)
        path.write_text(text)
        return path

    output = directory / "run"
    code, printed = stop_after(2, "controller", signal.SIGKILL, manifest(MORE_STEPS_THAN_NEEDED), output, **ENVIRONMENT)
    assert code == -signal.SIGKILL, printed
    return rljob_run(manifest(committed_steps(output) + 2), output, **ENVIRONMENT)


def test_every_step_is_in_the_event_files_once(resumed: FinishedRun) -> None:
    assert resumed.exit_code == 0, resumed.printed
    events = EventAccumulator(str(resumed.output / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    reported = [(event.step, round(event.value, 5)) for event in events.Scalars("reward/mean")]
    assert reported == [(step["step"], round(step["reward"]["mean"], 5)) for step in resumed.steps]
    assert {"samples/train", "summary", "manifest"} <= set(events.Tags()["tensors"])
    assert {"loss", "seconds/update", "memory/policy"} <= set(events.Tags()["scalars"])


def test_both_attempts_are_in_one_run_of_wandb(resumed: FinishedRun) -> None:
    runs = {path.suffix and path.name for path in resumed.output.glob("wandb/offline-run-*/run-*.wandb")}
    run_id = json.loads((resumed.output / ".trackers" / "wandb.json").read_text())["run_id"]
    assert runs == {f"run-{run_id}.wandb"}
    assert len(list(resumed.output.glob("wandb/offline-run-*"))) == 2


def test_a_silent_server_causes_a_warning_and_no_secret_is_printed(resumed: FinishedRun) -> None:
    assert resumed.printed.count("warning: the tracker mlflow did not finish within 30 s") == 1, resumed.printed
    assert "the tracker tensorboard" not in resumed.printed
    logs = "".join(path.read_text(errors="replace") for path in (resumed.output / "logs").glob("*.log"))
    assert ENVIRONMENT["WANDB_API_KEY"] not in resumed.printed + logs


def test_samples_of_every_step_are_kept_and_some_are_printed(resumed: FinishedRun) -> None:
    samples = read_samples(resumed.output / "samples.jsonl")
    assert [sample.step for sample in samples] == [step["step"] for step in resumed.steps for _ in range(2)]
    assert all(sample.prompt and sample.response for sample in samples)
    last = resumed.steps[-1]["step"]
    shown = last - last % 2
    assert f"sample of step {shown}  prompt " in resumed.printed
    code, printed, _ = show(resumed.output)
    assert code == 0
    assert f"sample of step {last}  prompt" in printed
