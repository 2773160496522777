"""The operator with processes that are killed and tenants that are hostile; it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_cluster.layout import ClusterLayout
from rljob_testing.cluster import AdminKubectl, InstalledOperator, digits, holds
from rljob_testing.soak.cluster import SoakCluster
from rljob_testing.soak.report import problems, row
from rljob_testing.soak.soak import SoakSettings, run_soak

SEED = 660


@pytest.fixture
def soaked(operator: InstalledOperator, cluster: ClusterLayout) -> SoakCluster:
    """With a new operator pod: the soak compares its memory before and after."""
    operator.install("podAnnotations.test-run=soak")
    return SoakCluster.of_this_machine()


def test_jobs_complete_and_nothing_is_left_whatever_is_killed_meanwhile(soaked: SoakCluster, tmp_path: Path) -> None:
    settings = SoakSettings(SEED, minutes=3, streams=2, folder=tmp_path, hostile_tenant=True)
    soak = run_soak(settings, soaked, print)
    assert problems(soak) == []
    recorded = row(soak)
    assert recorded["complete"] == recorded["jobs"] >= 2
    assert len(recorded["each_fault"]) >= 4
    assert recorded["injected_failures"]
    assert sum(recorded["hostile_objects"].values()) > 50


def test_jobs_outlive_the_operator_and_go_without_it(jobs: AdminKubectl, operator: InstalledOperator) -> None:
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
