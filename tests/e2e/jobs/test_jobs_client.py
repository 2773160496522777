"""The Python SDK, the notebook and `kubectl rljob` with a job that trains in pods."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from rljob_client import RLJobClient
from rljob_cluster.layout import ClusterLayout
from rljob_testing.cluster import AdminKubectl, digits
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_testing.repository import EXAMPLES


def test_a_job_is_followed_and_its_files_are_fetched(
    jobs: AdminKubectl, cluster: ClusterLayout, tmp_path: Path
) -> None:
    client = RLJobClient(jobs.namespace, kubeconfig=str(cluster.kubeconfig))
    job = client.create(digits(algorithm={"steps": 20}, policy={"gpusPerReplica": 0}))
    phases: list[str] = []
    job.wait(timeout=PATIENCE_SECONDS, on_progress=lambda job: phases.append(job.phase))
    assert (phases[0], phases[-1]) == ("Pending", "Complete")
    assert [step.step for step in job.metrics()] == list(range(1, 21))
    assert "start-up" in job.logs()
    assert (job.model(tmp_path / "model") / "model.safetensors").is_file()

    def plugin(*words: str) -> str:
        program = "from rljob_client.__main__ import kubectl_plugin; kubectl_plugin()"
        command = [sys.executable, "-c", program, *words, "-n", jobs.namespace]
        variables = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
        done = subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert plugin("status", "digits").startswith("digits  Complete  step 20/20")
    assert "policy 0" in plugin("top", "digits")
    assert plugin("logs", "digits") == job.logs()
    assert "No out-of-memory failure" in plugin("diagnose", "digits")
    assert plugin("report", "digits") == "digits.html\n"
    assert "<html" in (tmp_path / "digits.html").read_text()
    assert plugin("model", "digits", "-o", "again") == "again\n"
    assert (tmp_path / "again" / "config.json").is_file()


def test_the_notebook_trains_and_fetches_a_model(
    jobs: AdminKubectl, cluster: ClusterLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = jobs.namespace
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    shutil.copy(EXAMPLES / "digits-cpu.yaml", tmp_path)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    path = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=int(PATIENCE_SECONDS), resources=path).execute()
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "report.html").is_file()
