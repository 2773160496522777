"""Start of Ray: by the node of a pod, and by a run on this machine."""

from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rljob_client.errors import BadInput, RunError
from rljob_memory.budget.host import object_store_bytes
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_testing.repository import ROOT
from rljob_trainer.errors import WorkerLost
from rljob_trainer.pods.ray_node import EXIT_DIED, begin, endpoint, head_command, require_started, worker_command
from rljob_trainer.roles import ray_driver

PORT = 6380


def options(command: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (part.removeprefix("--").partition("=") for part in command[4:])}


def test_the_head_has_the_documented_ports_and_no_resources_for_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000 << 20))
    head = options(head_command(pod_ip="10.0.0.1", port=6379, first_port=PORT))
    assert (head["num-cpus"], head["num-gpus"]) == ("0", "0")
    assert "resources" not in head
    assert int(head["object-store-memory"]) == (1000 << 20) - (1000 << 20) // 17, "room is left in shared memory"
    ports = {name: int(value) for name, value in head.items() if name.endswith("port")}
    rows = re.findall(r"^\| (\d{4}[^|]*)\|", (ROOT / "docs" / "trainer-in-pods.md").read_text(), re.M)
    assert set(ports.values()) == {int(port) for row in rows for port in re.findall(r"\d{4}", row)}
    of_workers = range(ports.pop("min-worker-port") + 1, ports.pop("max-worker-port") + 1)
    assert len(set(ports.values())) == len(ports)
    assert not set(ports.values()) & set(of_workers)


def test_a_worker_is_found_by_its_own_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000 << 20))
    command = worker_command(
        head="10.0.0.1:6379",
        pod_ip="10.0.0.2",
        first_port=PORT,
        cpus=4,
        gpus=2,
        resource="worker-3",
        shared_by_others_bytes=300 << 20,
    )
    worker = options(command)
    assert int(worker["object-store-memory"]) == (700 << 20) - (700 << 20) // 17
    assert worker["resources"] == '{"worker-3": 1}'
    assert (worker["address"], worker["num-cpus"], worker["num-gpus"]) == ("10.0.0.1:6379", "4", "2")
    assert (endpoint("10.0.0.1", 6379), endpoint("fd00::1", 6379)) == ("10.0.0.1:6379", "[fd00::1]:6379")


START_UNTIL_PROCESSES = """
import sys
from ray._private import node
from rljob_trainer.pods import ray_node
def started(self, parameters, **_):
    served = [name for name in sys.modules if name.startswith("ray.serve.")]
    raise SystemExit(f"client server: {parameters.ray_client_server_port}, imported: {served}")
node.Node.__init__ = started
ray_node.main()
"""


def test_the_head_serves_no_remote_drivers_and_imports_no_ray_serve(tmp_path: Path) -> None:
    command = head_command(pod_ip="127.0.0.1", port=6379, first_port=PORT)
    begun = begin([command[0], "-c", START_UNTIL_PROCESSES, *command[3:]], tmp_path / "log")
    begun.wait(PATIENCE_SECONDS)
    assert "client server: None, imported: ['ray.serve.scripts']" in (tmp_path / "log").read_text()


def test_a_failed_start_shows_the_last_output_of_ray(tmp_path: Path) -> None:
    log = tmp_path / "ray-start.log"
    log.write_text("INFO Local node IP: 10.0.0.2\nConnectionError: token is wrong\n")
    with pytest.raises(RunError, match=r"exit code 1\): ConnectionError: token is wrong .*ray-start\.log"):
        require_started(1, log)
    require_started(0, log)
    with pytest.raises(WorkerLost):
        require_started(EXIT_DIED, log)


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this process changes when Ray is started."""
    monkeypatch.setattr(ray_driver, "change_start_of_raylets", lambda: None)
    monkeypatch.setattr(ray_driver, "start_only_what_is_used", lambda: None)
    monkeypatch.setattr(ray_driver, "_LOCAL_ENVIRONMENT", {})
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("starting")
@pytest.mark.parametrize(
    ("failures", "starts", "raised", "expected"),
    [
        ([], 1, None, ""),
        ([ray_driver.RayDied("raylet")] * 2, 3, None, ""),
        ([ray_driver.RayDied("raylet with exit code -6")] * 3, 3, WorkerLost, r"each of 3 times .* -6.*retry"),
        ([Exception("The current node timed out during startup. This could happen")], 1, WorkerLost, "busy"),
        ([Exception("something else")], 1, Exception, "^something else"),
    ],
)
def test_a_ray_that_dies_is_started_three_times_at_most(
    failures: list[Exception],
    starts: int,
    raised: type[Exception] | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = []

    def init(**_: Any) -> None:
        begun.append(1)
        if len(begun) <= len(failures):
            raise failures[len(begun) - 1]

    monkeypatch.setattr(ray, "init", init)
    with nullcontext() if raised is None else pytest.raises(raised, match=expected):
        ray_driver.start_local_ray(cpus=1, gpus=0, object_store_bytes=1)
    assert len(begun) == starts


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


def test_the_object_store_holds_buckets_of_weights_on_cpus_only() -> None:
    assert object_store_bytes(1 << 20, "cuda") == object_store_bytes(1 << 30, "cuda") == 128 << 20
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
def test_ray_imports_nothing_from_the_working_directory(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", before or "")
    if before is None:
        monkeypatch.delenv("PYTHONSAFEPATH")
    given: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda job_config, **_: given.extend([job_config, os.environ["PYTHONSAFEPATH"]]))
    ray_driver.start_local_ray(cpus=1, gpus=0, object_store_bytes=1)
    assert given[1] == "1"
    assert os.environ.get("PYTHONSAFEPATH") == before
    monkeypatch.setattr(sys, "path", ["/own"])
    given[0]._py_driver_sys_path.extend(["/working/directory", "/own"])
    assert given[0]._py_driver_sys_path == ["/own"]
