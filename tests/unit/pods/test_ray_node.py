"""Start of the Ray node of a pod."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_client.errors import RunError
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_trainer.errors import WorkerLost
from rljob_trainer.pods.ray_node import RayPorts, begin, endpoint, head_command, require_started, worker_command
from rljob_trainer.pods.ray_start import EXIT_DIED

PORTS = RayPorts(6380)
PAGE = Path(__file__).parents[3] / "docs" / "trainer-in-pods.md"


def options(command: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (part.removeprefix("--").partition("=") for part in command[4:])}


def test_the_head_has_no_resources_for_roles() -> None:
    head = options(head_command(pod_ip="10.0.0.1", port=6379, ports=PORTS))
    assert (head["num-cpus"], head["num-gpus"]) == ("0", "0")
    assert "resources" not in head


def test_a_worker_is_found_by_its_own_resource() -> None:
    command = worker_command(head="10.0.0.1:6379", pod_ip="10.0.0.2", ports=PORTS, cpus=4, gpus=2, resource="worker-3")
    worker = options(command)
    assert worker["resources"] == '{"worker-3": 1}'
    assert (worker["address"], worker["num-cpus"], worker["num-gpus"]) == ("10.0.0.1:6379", "4", "2")


def test_every_port_is_fixed_and_used_once() -> None:
    head = options(head_command(pod_ip="10.0.0.1", port=6379, ports=PORTS))
    ports = [int(value) for name, value in head.items() if name.endswith("port") and not name.startswith("max")]
    assert len(ports) == len(set(ports)) == 8
    assert max(ports) < int(head["max-worker-port"])
    assert not set(ports) & set(range(int(head["min-worker-port"]) + 1, int(head["max-worker-port"]) + 1))


def test_the_head_serves_no_remote_drivers_and_imports_no_ray_serve(tmp_path: Path) -> None:
    """Runs the code of `ray start` up to the start of its processes."""
    program = (
        "import sys\n"
        "from ray._private import node\n"
        "from rljob_trainer.pods import ray_start\n"
        "def started(self, parameters, **_):\n"
        "    served = [name for name in sys.modules if name.startswith('ray.serve.')]\n"
        "    raise SystemExit(f'client server: {parameters.ray_client_server_port}, imported: {served}')\n"
        "node.Node.__init__ = started\n"
        "ray_start.main()\n"
    )
    command = head_command(pod_ip="127.0.0.1", port=6379, ports=PORTS)
    begun = begin([command[0], "-c", program, *command[3:]], tmp_path / "log")
    begun.wait(PATIENCE_SECONDS)
    assert "client server: None, imported: ['ray.serve.scripts']" in (tmp_path / "log").read_text()


def test_the_documented_ports_are_those_that_are_used() -> None:
    head = options(head_command(pod_ip="10.0.0.1", port=6379, ports=PORTS))
    used = {int(value) for name, value in head.items() if name.endswith("port")}
    documented = {int(port) for row in re.findall(r"^\| (\d{4}[^|]*)\|", PAGE.read_text(), re.M) for port in _all(row)}
    assert used == documented


def _all(row: str) -> list[str]:
    return re.findall(r"\d{4}", row)


def test_object_store_leaves_room_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000 << 20

    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage)
    head = options(head_command(pod_ip="10.0.0.1", port=6379, ports=PORTS))
    assert int(head["object-store-memory"]) == 800 << 20


def test_a_failed_start_shows_the_last_output_of_ray(tmp_path: Path) -> None:
    log = tmp_path / "ray-start.log"
    log.write_text("INFO Local node IP: 10.0.0.2\nConnectionError: token is wrong\n")
    with pytest.raises(RunError, match=r"exit code 1\): ConnectionError: token is wrong .*ray-start\.log"):
        require_started(1, log)
    require_started(0, log)
    with pytest.raises(WorkerLost):
        require_started(EXIT_DIED, log)


@pytest.mark.parametrize(("ip", "written"), [("10.0.0.1", "10.0.0.1:6379"), ("fd00::1", "[fd00::1]:6379")])
def test_addresses_of_both_families_are_written_with_their_port(ip: str, written: str) -> None:
    assert endpoint(ip, 6379) == written
