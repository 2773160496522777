"""Jobs in pods, which are processes of this machine; the API server that the controller reports to is a real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rljob_api.exit_codes import ExitCode
from rljob_api.step_report import StepReport, StepReportStatus
from rljob_api.termination_message import TerminationMessage
from rljob_cluster.binaries import CONTROL_PLANE, require_binaries
from rljob_cluster.commands import ClusterError
from rljob_cluster.control_plane import ControlPlane
from rljob_testing.repository import ROOT
from rljob_testing.runs import rljob_run, write_manifest
from rljob_trainer.pods.compile_cache import CompileCache
from rljob_trainer.step_report import api_server
from rljob_trainer.step_report.api_server import NoAnswer, StepReportClient
from tests.integration.compared_runs import MORE_STEPS_THAN_NEEDED
from tests.integration.pod_processes import PodProcess, Pods, PodsOfAttempt

API_PORT = 21900
LAST_STEPS = 20
"""Steps of the attempt that completes the job."""
WORKERS = 2
COMPILE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")


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
        """Environment variables of the pod that reports."""
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
class EndedAttempt:
    """An attempt that is over."""

    exit_code: int
    message: TerminationMessage
    worker_exit_codes: list[int | None]
    steps: int
    report: StepReportStatus
    log: str
    compile_directories: list[str] = field(default_factory=list)
    """Compile directories of the roles in the first worker's pod, relative to its temporary directory."""


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
    compiled = {"RLJOB_COMPILE_CACHE_DIR": str(directory / "volume" / ".compile-cache")}
    return Pods(directory, manifest, WORKERS, cluster.variables(), of_workers=compiled)


def write_job(manifest: Path, steps: int) -> Path:
    return write_manifest(
        manifest,
        algorithm={"steps": steps, "promptsPerStep": 4, "groupSize": 4},
        policy={"replicas": WORKERS, "gpusPerReplica": 0},
        checkpoint={"everySteps": 10},
    )


def ended(attempt: PodsOfAttempt, cluster: Cluster) -> EndedAttempt:
    exit_code = attempt.controller.wait()
    return EndedAttempt(
        exit_code,
        attempt.controller.termination_message,
        [worker.wait() for worker in attempt.workers],
        len(attempt.committed()),
        cluster.report(),
        attempt.controller.log,
    )


def compile_directories(worker: PodProcess) -> list[str]:
    """Compile directories of the Ray actors in the pod: a policy rank and an engine."""
    found = []
    for process in psutil.Process(worker.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Ray's idle processes end at any time
            if process.name().startswith("rljob: "):
                environment = process.environ()
                found += [os.path.relpath(environment[name], worker.temporary) for name in COMPILE_VARIABLES]
    return found


@pytest.fixture(scope="module")
def lost_worker(pods: Pods, cluster: Cluster) -> EndedAttempt:
    attempt = pods.start(1)
    try:
        attempt.wait_for_step(2)
        assert attempt.controller.ready
        # Its node of Ray is used from its start on, a moment before the worker reports it.
        attempt.wait_until(lambda: all(worker.ready for worker in attempt.workers), "readiness of the workers")
        directories = compile_directories(attempt.workers[0])
        attempt.workers[1].kill()
        return replace(ended(attempt, cluster), compile_directories=directories)
    finally:
        attempt.kill()


@pytest.fixture(scope="module")
def stopped(lost_worker: EndedAttempt, pods: Pods, cluster: Cluster) -> EndedAttempt:
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
def completed(stopped: EndedAttempt, pods: Pods, cluster: Cluster) -> EndedAttempt:
    assert stopped.report.plan is not None
    pods.plan = stopped.report.plan.model_copy(update={"generation": 4})
    write_job(pods.manifest, stopped.steps + LAST_STEPS)
    attempt = pods.start(3)
    try:
        return ended(attempt, cluster)
    finally:
        attempt.kill()


def test_the_client_applies_and_reads_a_report(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "_TIMEOUT", 120.0)  # five seconds are short on a busy machine
    host, port = (cluster.variables()[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
    client = StepReportClient(host, port, cluster.service_account, "default", "digits")
    client.apply(StepReportStatus(attempt=1, step=3, reward=0.5))
    client.apply(StepReportStatus(attempt=1, step=4))
    read = client.read()
    assert read is not None
    assert (read.step, read.reward) == (4, None), "an apply takes back what it leaves out"

    with pytest.raises(NoAnswer, match=r'403: stepreports.* "other" is forbidden'):
        StepReportClient(host, port, cluster.service_account, "default", "other").apply(StepReportStatus())

    (tmp_path / "ca.crt").write_bytes((cluster.service_account / "ca.crt").read_bytes())
    (tmp_path / "token").write_text("expired")
    client = StepReportClient(host, port, tmp_path, "default", "digits")
    with pytest.raises(NoAnswer, match="401"):
        client.read()
    (tmp_path / "token").write_text((cluster.service_account / "token").read_text())
    assert client.read() is not None


def test_a_lost_worker_ends_the_attempt_and_is_named(lost_worker: EndedAttempt) -> None:
    assert lost_worker.exit_code == ExitCode.WORKER_LOST, lost_worker.log
    assert lost_worker.worker_exit_codes == [ExitCode.COMPLETE, -signal.SIGKILL]
    assert lost_worker.message.exit_code == ExitCode.WORKER_LOST
    assert lost_worker.message.message.startswith("In pod digits-policy-1: ")
    assert f"resumes at step {lost_worker.steps + 1}" in lost_worker.message.message
    assert lost_worker.message.step == lost_worker.steps >= 2
    report = lost_worker.report
    assert report.attempt == 1
    assert report.plan is not None
    assert report.plan_generation == report.plan.generation == 1
    assert report.step == lost_worker.steps, "the last report is sent before the pod ends"
    assert {(memory.role, memory.rank) for memory in report.memory} == {
        (role, rank) for role in ("policy", "rollout") for rank in range(WORKERS)
    }
    assert all(memory.peak_rss_bytes > 2**28 for memory in report.memory)


def test_a_drained_worker_works_until_the_controller_has_committed(stopped: EndedAttempt, pods: Pods) -> None:
    assert stopped.exit_code == ExitCode.TERMINATED, stopped.log
    assert stopped.message.exit_code == ExitCode.TERMINATED
    assert stopped.worker_exit_codes == [ExitCode.COMPLETE, ExitCode.COMPLETE]
    assert (pods.output / "checkpoints" / f"step-{stopped.steps:06}").is_dir()


def test_the_next_attempt_continues_under_the_plan_that_it_is_given(
    completed: EndedAttempt, stopped: EndedAttempt, pods: Pods, cluster: Cluster
) -> None:
    assert completed.exit_code == ExitCode.COMPLETE, completed.log
    steps = stopped.steps + LAST_STEPS
    assert completed.message == TerminationMessage(exit_code=0, message=ExitCode.COMPLETE.meaning, step=steps)
    ledger = [json.loads(line) for line in (pods.output / "ledger.jsonl").read_text().splitlines()]
    assert [record["step"] for record in ledger if record["kind"] == "step"] == list(range(1, steps + 1))
    assert [record["plan"]["generation"] for record in ledger if record["kind"] == "attempt"] == [1, 1, 4]
    assert (pods.output / "model" / "model.safetensors").exists()
    report = completed.report
    assert (report.attempt, report.step, report.plan_generation) == (3, completed.steps, 4)
    assert report.reward is not None
    assert "f:step" in cluster.field_managers()["rljob-trainer"]["f:status"]


def test_a_pod_logs_steps_alone_and_leaves_no_process_or_foreign_file(completed: EndedAttempt, pods: Pods) -> None:
    assert sum(line.startswith("step ") for line in completed.log.splitlines()) == LAST_STEPS
    assert "INFO" not in completed.log
    assert "\x1b" not in completed.log
    for directory in pods.directory.glob("*-3"):
        assert {path.name for path in directory.iterdir()} <= {"run", "home", "termination-log", "log"}
    assert [process for process in psutil.process_iter() if str(pods.directory) in _command(process)] == []


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_roles_compile_in_the_directory_that_the_worker_saves(lost_worker: EndedAttempt) -> None:
    assert len(lost_worker.compile_directories) == 2 * len(COMPILE_VARIABLES), "of the policy and the rollout"
    assert all(directory.startswith("rljob-compiled/") for directory in lost_worker.compile_directories)


# --- rollout pods ---


def disaggregated(directory: Path, steps: int) -> Path:
    path = write_manifest(
        directory / f"job-{steps}.yaml",
        algorithm={"steps": steps, "promptsPerStep": 4, "groupSize": 4, "maxResponseTokens": 64},
        policy={"replicas": 1, "gpusPerReplica": 0},
        rollout={"replicas": 2, "gpusPerReplica": 0},
        checkpoint={"everySteps": 20},
    )
    job = yaml.safe_load(path.read_text())
    job["spec"]["topology"] = "Disaggregated"
    path.write_text(yaml.safe_dump(job))
    return path


def wait_for_engines(attempt: PodsOfAttempt, *engines: str) -> None:
    """Until a step is generated by just these."""

    def worked() -> bool:
        steps = attempt.committed()
        return bool(steps) and {name for name in steps[-1]["memory_bytes"] if "rollout" in name} == set(engines)

    attempt.wait_until(worked, f"a step of {engines}")


def lose(attempt: PodsOfAttempt, pod: PodProcess) -> None:
    attempt.workers.remove(pod)
    pod.wait()


def learned(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(step["step"], step["reward"], step["metrics"]) for step in steps]


@pytest.mark.long
def test_lost_rollout_pods_are_replaced_while_the_others_generate(tmp_path: Path) -> None:
    pods = Pods(tmp_path, disaggregated(tmp_path, MORE_STEPS_THAN_NEEDED), workers=3, rollouts=2)
    attempt = pods.start(1)
    _, first, second = attempt.workers
    try:
        wait_for_engines(attempt, "rollout-0", "rollout-1")
        second.kill()
        lose(attempt, second)
        wait_for_engines(attempt, "rollout-0")
        attempt.workers.append(pods.start_again(second))
        wait_for_engines(attempt, "rollout-0", "rollout-1")
        first.send(signal.SIGTERM)  # as when its node is drained
        lose(attempt, first)
        assert first.termination_message.exit_code == ExitCode.TERMINATED
        wait_for_engines(attempt, "rollout-1")
        attempt.controller.send(signal.SIGTERM)
        assert attempt.controller.wait() == ExitCode.TERMINATED, attempt.logs
    finally:
        attempt.kill()
    log = " ".join(attempt.controller.log.split())
    for name in ("rollout-1", "rollout-0"):
        assert log.count(f"Continuing without a pod: {name} died while") == 1

    committed = attempt.committed()
    undisturbed = rljob_run(disaggregated(tmp_path, len(committed)), tmp_path / "undisturbed")
    assert undisturbed.exit_code == ExitCode.COMPLETE, undisturbed.printed
    assert learned(committed) == learned(undisturbed.steps)


PROGRAM = """
import json
import torch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
layer = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
compiled = torch.compile(layer.forward, dynamic=True)
compiled(torch.randn(3, 8)).square().sum().backward()
counts = {**counters["aot_autograd"], **counters["inductor"]}
print(json.dumps({"hits": counts.get("autograd_cache_hit", 0), "misses": counts.get("autograd_cache_miss", 0)}))
"""


def compile_with(cache: CompileCache) -> dict[str, int]:
    """Cache hits and misses of a process that compiles a layer, forward and backward."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | cache.variables(), capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, int] = json.loads(finished.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch needs a C++ compiler on a CPU")
def test_the_next_pod_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def new_pod() -> CompileCache:
        """The local directory has the same path in every pod, and is empty in a new one."""
        shutil.rmtree(tmp_path / "pod", ignore_errors=True)
        return CompileCache(tmp_path / "pod", tmp_path / "volume", "key-policy")

    first = new_pod()
    first.restore()
    assert compile_with(first) == {"hits": 0, "misses": 1}
    two_minutes_later = time.time() + 120
    monkeypatch.setattr(time, "time", lambda: two_minutes_later)
    assert "kept in" in (first.save_if_settled() or "")
    monkeypatch.undo()

    second = new_pod()
    assert "restored from" in second.restore()
    assert compile_with(second) == {"hits": 1, "misses": 0}
