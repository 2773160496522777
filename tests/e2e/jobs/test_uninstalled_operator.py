"""Uninstalling the operator keeps its jobs; installing it again resumes them."""

from __future__ import annotations

from rljob_testing.cluster.installed_operator import InstalledOperator
from rljob_testing.cluster.job_status import digits, holds
from rljob_testing.cluster.kubectl import Kubectl


def test_jobs_outlive_the_operator_and_go_without_it(jobs: Kubectl, operator: InstalledOperator) -> None:
    jobs.apply(digits("kept", suspend=True), digits("deleted", suspend=True))
    for name in ("kept", "deleted"):
        job = jobs.wait("rljob", name, holds("Suspended"))
        assert job["metadata"]["finalizers"] == ["rljob.dev/pods-end-first"]

    operator.uninstall()
    try:
        assert "finalizers" not in jobs.get("rljob", "kept")["metadata"]
        jobs("delete", "rljob", "deleted", "--timeout=60s")
    finally:
        operator.install()

    jobs.wait("rljob", "kept", lambda job: job["metadata"].get("finalizers"))
    jobs("delete", "rljob", "kept", "--timeout=240s")
