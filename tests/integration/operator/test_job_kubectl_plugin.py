"""`kubectl rljob`, started by kubectl itself, with a real API server and operator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rljob_api.exit_codes import ExitCode
from rljob_client.run_directory.ledger import Ledger
from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator.kubelet_server import KubeletServer
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import PATIENCE_SECONDS, eventually
from rljob_testing.repository import EXAMPLES
from rljob_trainer.models.resolve import resolve_model
from tests.integration.operator.test_job_life import wait_for_attempt

Plugin = Callable[..., subprocess.CompletedProcess[str]]

GIB = 2**30
MEMORY = {
    "role": "policy",
    "rank": 0,
    "reservedBytes": 20 * GIB,
    "peakReservedBytes": 31 * GIB,
    "deviceTotalBytes": 80 * GIB,
    "hostUsedBytes": 3 * GIB,
    "hostLimitBytes": 16 * GIB,
}
FACTS = {
    "parameters": 596_049_920,
    "layers": 28,
    "hidden": 1024,
    "heads": 16,
    "kvHeads": 8,
    "headDim": 128,
    "intermediate": 3072,
    "vocabulary": 151_936,
    "bytesPerParameter": 2,
    "deviceMemoryBytes": 80 * GIB,
    "hostMemoryBytes": 512 * GIB,
    "gpu": "NVIDIA H100 80GB HBM3",
}


@pytest.fixture
def plugin(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Plugin:
    """`kubectl rljob WORD…` with the test's namespace as that of the context."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, call in (
        ("kubectl-rljob", "from rljob_client.__main__ import kubectl_plugin; kubectl_plugin()"),
        ("kubectl_complete-rljob", "from rljob_client.kubectl_plugin import complete; complete()"),
    ):
        (programs / name).write_text(f"#!{sys.executable}\n{call}\n")
        (programs / name).chmod(0o755)
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = namespace
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    variables = os.environ | {
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
    }

    def run(*words: str, code: int = 0, first: str = "rljob") -> subprocess.CompletedProcess[str]:
        command = [str(control_plane.kubectl), first, *words]
        done = subprocess.run(
            command,
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def test_a_running_job_is_shown_changed_and_listed(
    plugin: Plugin, job: WatchedJob, kubelet_server: KubeletServer
) -> None:
    job.create().run(step=3, memory=[MEMORY], memoryFacts=FACTS)
    kubelet_server.logs[job.namespace, "job-controller"] = "step 3 of 10\n"
    eventually(lambda: job.status.get("step") == 3, "the reported step", context=lambda: job.status)

    tree = plugin("status", "job").stdout
    assert tree.splitlines()[0] == "job  Running  step 3/10  in rollout  reward 0.5"
    for text in (
        "Running=True  StepsCommitted",
        "memory plan, generation 1: emptyCache",
        "attempt 1  from step 1, for",
        "job-controller  Running  cpu-node",
        "job-policy-0  Running  gpu-node  1 × nvidia.com/gpu",
        "GPU of policy 0: peak 31.00 GiB of 80.00 GiB",
    ):
        assert text in tree
    assert plugin("top", "job").stdout.splitlines()[2].split()[:6] == ["policy", "0", "20.00", "GiB", "31.00", "GiB"]
    assert plugin("logs", "job").stdout == plugin("logs", "job", "-f").stdout == "step 3 of 10\n"
    assert "0.60 billion parameters on 1 × h100" in plugin("plan", "job").stdout
    listed = plugin("list").stdout.splitlines()
    assert listed[0].split() == ["name", "phase", "step", "reward", "explanation"]
    assert listed[1].split()[:4] == ["job", "Running", "3/10", "0.5"]
    assert job.namespace in plugin("list", "-A").stdout

    assert plugin("suspend", "job").stdout == "job is being suspended\n"
    job.wait_for_pods(0)
    assert plugin("resume", "job").stdout == "job resumes\n"
    wait_for_attempt(job, 2)
    job.end_controller(ExitCode.BAD_INPUT, step=3)
    eventually(lambda: job.phase == "Failed", "the failure", context=lambda: job.status)
    assert "BadInput (exit code 84)" in plugin("status", "job").stdout
    assert plugin("retry", "job").stdout == "job is tried again\n"
    wait_for_attempt(job, 3)
    assert "No out-of-memory failure found" in plugin("diagnose", "job").stdout


def test_status_follows_a_job_until_it_is_deleted(plugin: Plugin, control_plane: ControlPlane, job: WatchedJob) -> None:
    job.create(suspend=True)
    eventually(lambda: job.phase == "Suspended", "the phase")
    program = "from rljob_client.__main__ import kubectl_plugin; kubectl_plugin()"
    command = [sys.executable, "-c", program, "status", "job", "--watch", "--namespace", job.namespace]
    command += ["--kubeconfig", str(control_plane.kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "job  Suspended  step 0/10\n"
        job.delete()
        assert watching.communicate(timeout=PATIENCE_SECONDS)[0].splitlines()[-1] == "job was deleted"
    assert watching.returncode == 0


def test_files_of_a_job_are_written_here(plugin: Plugin, job: WatchedJob, volume: Path, tmp_path: Path) -> None:
    job.create().run(step=1)
    resolve_model("random://qwen3?hidden=32&layers=1&heads=2&kvHeads=2", tmp_path / "cache").rename(volume / "model")
    assert plugin("model", "job").stdout == "runs/job/model\n"
    assert (tmp_path / "runs" / "job" / "model" / "config.json").is_file()
    with Ledger(volume / "ledger.jsonl") as ledger:
        ledger.begin_attempt(0.0, {}, {}, {})
    assert plugin("report", "job").stdout == "job.html\n"
    assert (tmp_path / "job.html").is_file()
    assert "GiB" in plugin("plan", str(EXAMPLES / "digits.yaml")).stdout


def test_a_failure_is_one_line_with_advice(plugin: Plugin) -> None:
    for words, message in (
        (("status", "nobody"), 'kubectl rljob: rljobs.rljob.dev "nobody" not found; check its name and its namespace'),
        (("diagnose", "nobody"), "kubectl rljob: expected pods of the job nobody, found none"),
        (("list", "--context", "nowhere"), "kubectl rljob: expected a kubeconfig with the context nowhere"),
    ):
        done = plugin(*words, code=1)
        assert done.stderr.startswith(message)
        assert done.stderr.count("\n") == 1


def test_kubectl_completes_commands_and_names(plugin: Plugin, job: WatchedJob) -> None:
    job.create(suspend=True)
    for words, expected in ((("sta",), {"status", ":4"}), (("status", ""), {"job", ":4"}), (("top", "x"), {":4"})):
        assert set(plugin("rljob", *words, first="__complete").stdout.splitlines()) == expected
