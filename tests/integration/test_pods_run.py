"""A job in pods, through three attempts: a worker is lost, the controller is stopped, and the third one completes.

The pods are processes of this machine; the API server that the controller reports to is a real one.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.step_report import StepReport, StepReportStatus
from rljob_api.termination_message import TerminationMessage
from rljob_cluster.binaries import CONTROL_PLANE, require_binaries
from rljob_cluster.control_plane import ControlPlane
from rljob_cluster.errors import ClusterError
from rljob_testing.repository import ROOT
from rljob_testing.runs import write_manifest
from rljob_trainer.step_report import api_server
from rljob_trainer.step_report.api_server import ApiServer, NoAnswer
from rljob_trainer.step_report.client import StepReportClient
from tests.integration.pod_processes import Attempt, Pods
from tests.integration.stopped_runs import MORE_STEPS_THAN_NEEDED

API_PORT = 21900
LAST_STEPS = 20
"""Of the attempt that completes the job."""
WORKERS = 2


class Cluster:
    """The API server, with the StepReport of the job and an account that may write it."""

    def __init__(self, control_plane: ControlPlane, service_account: Path) -> None:
        self._control_plane = control_plane
        self.service_account = service_account
        self.kubectl("apply", "-f", str(ROOT / "crds" / "manifests"))
        control_plane.wait_established()
        self.kubectl("create", "serviceaccount", "trainer")
        report = ["--resource=stepreports.rljob.dev/status", "--resource-name=digits"]
        self.kubectl("create", "role", "trainer", "--verb=patch", *report)
        self.kubectl("create", "rolebinding", "trainer", "--role=trainer", "--serviceaccount=default:trainer")
        empty = {"apiVersion": "rljob.dev/v1alpha1", "kind": "StepReport", "metadata": {"name": "digits"}}
        self.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(empty))
        service_account.mkdir()
        (service_account / "ca.crt").write_bytes(control_plane.ca.read_bytes())
        (service_account / "token").write_text(self.kubectl("create", "token", "trainer"))

    def report(self) -> StepReportStatus:
        found = StepReport.model_validate_json(self.kubectl("get", "stepreport", "digits", "-o", "json"))
        return found.status or StepReportStatus()

    def field_managers(self) -> dict[str, Any]:
        shown = self.kubectl("get", "stepreport", "digits", "-o", "json", "--show-managed-fields")
        return {entry["manager"]: entry["fieldsV1"] for entry in json.loads(shown)["metadata"]["managedFields"]}

    def variables(self) -> dict[str, str]:
        """Of the pod that reports."""
        host, port = self._control_plane.url.removeprefix("https://").split(":")
        return {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
            "RLJOB_STEP_REPORT": "digits",
            "RLJOB_SERVICE_ACCOUNT": str(self.service_account),
        }

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        command = [str(self._control_plane.kubectl), f"--kubeconfig={self._control_plane.kubeconfig}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@dataclass
class Ended:
    """An attempt that is over."""

    exit_code: int
    message: TerminationMessage
    worker_exit_codes: list[int | None]
    steps: int
    report: StepReportStatus
    log: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    control_plane = ControlPlane(directory / "control-plane", base_port=API_PORT)
    try:
        require_binaries(control_plane.kubectl.parent, CONTROL_PLANE)
    except ClusterError as error:
        pytest.skip(f"no Kubernetes API server here: {error}")
    control_plane.start()
    try:
        yield Cluster(control_plane, directory / "service-account")
    finally:
        control_plane.stop()


@pytest.fixture(scope="module")
def pods(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Pods:
    directory = tmp_path_factory.mktemp("pods")
    manifest = write_job(directory / "job.yaml", MORE_STEPS_THAN_NEEDED)
    return Pods(directory, manifest, WORKERS, cluster.variables())


def write_job(manifest: Path, steps: int) -> Path:
    return write_manifest(
        manifest,
        algorithm={"steps": steps, "promptsPerStep": 4, "groupSize": 4},
        policy={"replicas": WORKERS, "gpusPerReplica": 0},
        checkpoint={"everySteps": 10},
    )


def ended(attempt: Attempt, cluster: Cluster) -> Ended:
    exit_code = attempt.controller.wait()
    return Ended(
        exit_code,
        attempt.controller.termination_message,
        [worker.wait() for worker in attempt.workers],
        len(attempt.committed()),
        cluster.report(),
        attempt.controller.log,
    )


@pytest.fixture(scope="module")
def lost_worker(pods: Pods, cluster: Cluster) -> Ended:
    attempt = pods.start(1)
    try:
        attempt.wait_for_step(2)
        assert attempt.controller.ready
        # Its node of Ray is used from its start on, a moment before the worker reports it.
        attempt.wait_until(lambda: all(worker.ready for worker in attempt.workers), "readiness of the workers")
        attempt.workers[1].kill()
        return ended(attempt, cluster)
    finally:
        attempt.kill()


@pytest.fixture(scope="module")
def stopped(lost_worker: Ended, pods: Pods, cluster: Cluster) -> Ended:
    attempt = pods.start(2)
    try:
        attempt.wait_for_step(lost_worker.steps + 1)
        for worker in attempt.workers:  # as in a deletion in the foreground, and on a node that is drained
            worker.send(signal.SIGTERM)
        attempt.wait_for_step(lost_worker.steps + 3)
        attempt.controller.send(signal.SIGTERM)
        return ended(attempt, cluster)
    finally:
        attempt.kill()


@pytest.fixture(scope="module")
def completed(stopped: Ended, pods: Pods, cluster: Cluster) -> Ended:
    assert stopped.report.plan is not None
    pods.plan = stopped.report.plan.model_copy(update={"generation": 4})
    write_job(pods.manifest, stopped.steps + LAST_STEPS)
    attempt = pods.start(3)
    try:
        return ended(attempt, cluster)
    finally:
        attempt.kill()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds are short for an API server on a busy machine."""
    monkeypatch.setattr(api_server, "_TIMEOUT", 120.0)


@pytest.fixture
def client(cluster: Cluster, patience: None) -> StepReportClient:
    return report_client(cluster, cluster.service_account, "digits")


def report_client(cluster: Cluster, service_account: Path, name: str) -> StepReportClient:
    host, port = (cluster.variables()[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
    return StepReportClient(ApiServer(host, port, service_account), "default", name)


@pytest.mark.usefixtures("patience")
class TestTheReportsClient:
    def test_what_an_apply_leaves_out_is_taken_back(self, client: StepReportClient, cluster: Cluster) -> None:
        client.apply(StepReportStatus(attempt=1, step=3, reward=0.5))
        client.apply(StepReportStatus(attempt=1, step=4))
        read = client.read()
        assert read is not None
        assert (read.step, read.reward) == (4, None)

    def test_a_refusal_is_told_in_the_servers_words(self, cluster: Cluster) -> None:
        other = report_client(cluster, cluster.service_account, "other")
        with pytest.raises(NoAnswer, match=r'403: stepreports.* "other" is forbidden'):
            other.apply(StepReportStatus(attempt=1))

    def test_a_token_that_was_replaced_is_read_again(self, cluster: Cluster, tmp_path: Path) -> None:
        (tmp_path / "ca.crt").write_bytes((cluster.service_account / "ca.crt").read_bytes())
        (tmp_path / "token").write_text("expired")
        client = report_client(cluster, tmp_path, "digits")
        with pytest.raises(NoAnswer, match="401"):
            client.read()
        (tmp_path / "token").write_text((cluster.service_account / "token").read_text())
        assert client.read() is not None

    def test_an_api_server_that_is_away_is_told_as_such(self, cluster: Cluster) -> None:
        away = StepReportClient(ApiServer("127.0.0.1", "1", cluster.service_account), "default", "digits")
        with pytest.raises(NoAnswer, match="cannot be reached"):
            away.apply(StepReportStatus())


def test_a_lost_worker_ends_the_attempt_which_says_whose_it_was(lost_worker: Ended) -> None:
    assert lost_worker.exit_code == ExitCode.WORKER_LOST, lost_worker.log
    assert lost_worker.message.exit_code == ExitCode.WORKER_LOST
    assert lost_worker.message.message.startswith("In pod digits-policy-1: ")
    assert f"resumes at step {lost_worker.steps + 1}" in lost_worker.message.message
    assert lost_worker.message.step == lost_worker.steps >= 2


def test_the_worker_that_is_left_ends_in_order(lost_worker: Ended) -> None:
    assert lost_worker.worker_exit_codes == [ExitCode.COMPLETE, -signal.SIGKILL]


def test_the_first_attempt_reports_the_plan_that_it_worked_out(lost_worker: Ended) -> None:
    report = lost_worker.report
    assert report.attempt == 1
    assert report.plan is not None
    assert report.plan_generation == report.plan.generation == 1
    assert report.step == lost_worker.steps, "the last report is sent before the pod ends"
    assert {(memory.role, memory.rank) for memory in report.memory} == {
        (role, rank) for role in ("policy", "rollout") for rank in range(WORKERS)
    }
    assert all(memory.peak_rss_bytes > 2**28 for memory in report.memory)


def test_a_drained_worker_works_until_the_controller_has_committed(stopped: Ended) -> None:
    assert stopped.exit_code == ExitCode.TERMINATED, stopped.log
    assert stopped.message.exit_code == ExitCode.TERMINATED
    assert stopped.worker_exit_codes == [ExitCode.COMPLETE, ExitCode.COMPLETE]


def test_a_stopped_attempt_leaves_a_checkpoint_of_its_last_step(stopped: Ended, pods: Pods) -> None:
    assert (pods.output / "checkpoints" / f"step-{stopped.steps:06}").is_dir()


def test_the_next_attempt_goes_on_and_no_step_is_done_twice(completed: Ended, stopped: Ended, pods: Pods) -> None:
    assert completed.exit_code == ExitCode.COMPLETE, completed.log
    steps = stopped.steps + LAST_STEPS
    assert completed.message == TerminationMessage(exit_code=0, message=ExitCode.COMPLETE.meaning, step=steps)
    ledger = [json.loads(line) for line in (pods.output / "ledger.jsonl").read_text().splitlines()]
    assert [record["step"] for record in ledger if record["kind"] == "step"] == list(range(1, steps + 1))
    assert len([record for record in ledger if record["kind"] == "attempt"]) == 3
    assert (pods.output / "model" / "model.safetensors").exists()


def test_a_plan_that_is_given_is_the_one_that_is_used(completed: Ended, pods: Pods) -> None:
    assert completed.report.plan_generation == 4
    attempts = [json.loads(line) for line in (pods.output / "ledger.jsonl").read_text().splitlines()]
    assert [record["plan"]["generation"] for record in attempts if record["kind"] == "attempt"] == [1, 1, 4]


def test_the_end_is_reported(completed: Ended, cluster: Cluster) -> None:
    assert (completed.report.attempt, completed.report.step) == (3, completed.steps)
    assert completed.report.reward is not None
    assert "f:step" in cluster.field_managers()["rljob-trainer"]["f:status"]


def test_the_log_has_a_line_a_step_and_nothing_of_the_libraries(completed: Ended) -> None:
    lines = [line for line in completed.log.splitlines() if line.startswith("step ")]
    assert len(lines) == LAST_STEPS
    assert "INFO" not in completed.log
    assert "\x1b" not in completed.log


def test_nothing_is_written_but_where_a_pod_may_write(completed: Ended, pods: Pods) -> None:
    allowed = {"run", "home", "termination-log", "log"}
    for directory in pods.directory.glob("*-3"):
        assert {path.name for path in directory.iterdir()} <= allowed


def test_no_process_outlives_its_pod(completed: Ended, pods: Pods) -> None:
    marked = [process for process in psutil.process_iter() if str(pods.directory) in _command(process)]
    assert marked == []


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
