"""Start of Ray by a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from rljob_client.errors import BadInput
from rljob_memory.planning.shared_memory import object_store_bytes
from rljob_trainer.errors import WorkerLost
from rljob_trainer.roles import ray_driver


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this process changes when Ray is started."""
    monkeypatch.setattr(ray_driver, "change_start_of_raylets", lambda: None)
    monkeypatch.setattr(ray_driver, "start_only_what_is_used", lambda: None)
    monkeypatch.setattr(ray_driver, "_LOCAL_ENVIRONMENT", {})
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("starting")
@pytest.mark.parametrize(
    ("said", "raised"),
    [("The current node timed out during startup. This could happen", WorkerLost), ("something else", Exception)],
)
def test_a_slow_start_of_ray_raises_its_own_error(
    monkeypatch: pytest.MonkeyPatch, said: str, raised: type[Exception]
) -> None:
    def init(**_: Any) -> None:
        raise Exception(said)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Exception, match=r"busy|else") as found:
        ray_driver.start_local_ray(cpus=1, gpus=0, object_store_bytes=1)
    assert type(found.value) is raised


@pytest.mark.usefixtures("starting")
@pytest.mark.parametrize("directory", ["missing", "long" * 30])
def test_a_directory_that_ray_cannot_use_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: str
) -> None:
    if directory != "missing":
        (tmp_path / directory).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / directory))
    with pytest.raises(BadInput, match=r"found .*; set RAY_TMPDIR"):
        ray_driver.start_local_ray(cpus=1, gpus=0, object_store_bytes=100 << 20)


@pytest.mark.usefixtures("starting")
@pytest.mark.parametrize("deaths", [0, 2, 3])
def test_ray_is_started_three_times_at_most(monkeypatch: pytest.MonkeyPatch, deaths: int) -> None:
    starts = []

    def init(**_: Any) -> None:
        starts.append(1)
        if len(starts) <= deaths:
            raise ray_driver.RayDied("raylet with exit code -6")

    monkeypatch.setattr(ray, "init", init)
    if deaths < 3:
        ray_driver.start_local_ray(cpus=1, gpus=0, object_store_bytes=1)
        assert len(starts) == deaths + 1
    else:
        with pytest.raises(WorkerLost, match=r"each of 3 times .*raylet with exit code -6.*retry"):
            ray_driver.start_local_ray(cpus=1, gpus=0, object_store_bytes=1)


def test_the_object_store_holds_buckets_of_weights_on_cpus_only() -> None:
    small, large = (object_store_bytes(bucket, "cuda") for bucket in (1 << 20, 1 << 30))
    assert small == large == 128 << 20
    assert object_store_bytes(1 << 30, "cpu") == (128 << 20) + (2 << 30)


def test_a_raylet_has_longer_than_rays_half_a_minute_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import node, services

    answers: list[Any] = [RuntimeError("not yet"), RuntimeError("not yet"), {"node_id": "n"}]

    def get_node(gcs_address: str, node_id: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(node.Node, "start_ray_processes", node.Node.start_ray_processes)  # put back afterwards
    ray_driver.change_start_of_raylets()
    patient = services.get_node
    ray_driver.change_start_of_raylets()
    assert services.get_node is patient, "once is enough"
    assert services.get_node("127.0.0.1:1", "n") == {"node_id": "n"}
    assert not answers


@pytest.mark.usefixtures("starting")
@pytest.mark.parametrize("before", [None, "", "1"])
def test_ray_imports_nothing_from_the_working_directory(
    before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if before is None:
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    given: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda job_config, **_: given.extend([job_config, os.environ["PYTHONSAFEPATH"]]))
    ray_driver.start_local_ray(cpus=1, gpus=0, object_store_bytes=1)
    assert given[1] == "1"
    assert os.environ.get("PYTHONSAFEPATH") == before
    monkeypatch.setattr(sys, "path", ["/own"])
    given[0]._py_driver_sys_path.extend([str(tmp_path), "/own"])
    assert given[0]._py_driver_sys_path == ["/own"]
