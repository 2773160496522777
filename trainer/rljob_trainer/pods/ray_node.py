"""This pod as a node of the job's Ray cluster, on ports that a network policy can name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_trainer.errors import TrainerError
from rljob_trainer.hardware import Bundle
from rljob_trainer.roles.ray_driver import RAY_ENVIRONMENT, start_only_what_is_used, wait_longer_for_raylets

GCS_RECONNECT_SECONDS = 10

_ENVIRONMENT = RAY_ENVIRONMENT | {
    # In a file, lines of both streams would otherwise stand in the wrong order.
    "PYTHONUNBUFFERED": "1",
    "RAY_START_HOOK": "rljob_trainer.pods.ray_node.before_start",
    # A node whose head is gone ends after so long.
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(GCS_RECONNECT_SECONDS),
}
_SHARED_MEMORY = "/dev/shm"
_SHARE_OF_SHARED_MEMORY = 0.8
"""The rest is for gloo, NCCL and torch."""
_LOGICAL_MEMORY_BYTES = 1 << 30
_WORKER_PORTS = 200
_A_LITTLE = 0.001
"""Of the resource that only one worker has: enough to be placed there, and there is enough for many."""


@dataclass(frozen=True, slots=True)
class RayPorts:
    """Every port that a pod's Ray listens on, beside the head's own: `first` and what follows."""

    first: int

    @property
    def node_manager(self) -> int:
        return self.first

    def options(self) -> dict[str, int]:
        return {
            "node-manager-port": self.first,
            "object-manager-port": self.first + 1,
            "runtime-env-agent-port": self.first + 2,
            "dashboard-agent-listen-port": self.first + 3,
            "dashboard-agent-grpc-port": self.first + 4,
            "metrics-export-port": self.first + 5,
            "min-worker-port": self.first + 20,
            "max-worker-port": self.first + 20 + _WORKER_PORTS - 1,
        }


def endpoint(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def head_command(*, pod_ip: str, port: int, ports: RayPorts) -> list[str]:
    """`ray start` of the head: it has no CPU and no GPU to give, so that no role runs in the controller's pod."""
    return _start(
        {
            "head": True,
            "port": port,
            "node-ip-address": pod_ip,
            "num-cpus": 0,
            "num-gpus": 0,
            "include-dashboard": "false",
            "no-monitor": True,
            **ports.options(),
        }
    )


def worker_command(*, head: str, pod_ip: str, ports: RayPorts, cpus: int, gpus: int, resource: str) -> list[str]:
    """`ray start` of a worker, which joins the head at `head` (address:port). `resource`: what only this worker has."""
    return _start(
        {
            "address": head,
            "node-ip-address": pod_ip,
            "num-cpus": cpus,
            "num-gpus": gpus,
            "resources": json.dumps({resource: 1}),
            **ports.options(),
        }
    )


def worker_resource(index: int) -> str:
    """The Ray resource by which roles are placed in the worker of that number."""
    return f"worker-{index}"


def only_on(worker: int) -> Bundle:
    """What to ask Ray for, to be placed in the worker of that number."""
    return {worker_resource(worker): _A_LITTLE}


def begin(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command`; it ends by itself when the node is up, and leaves the node's processes behind."""
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **_ENVIRONMENT})


def before_start(parameters: Any, head: bool) -> None:
    """Change what `ray start`, which calls this first, has no options for: no server for remote drivers, which would
    import Ray once more, and listen; no API server; and time for a raylet on a busy machine."""
    parameters.ray_client_server_port = None
    wait_longer_for_raylets()
    start_only_what_is_used()


def require_started(exit_code: int, log: Path) -> None:
    """Raise a `TrainerError` with the end of the log where `ray start` failed."""
    if exit_code != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise TrainerError(f"Ray did not start (exit code {exit_code}): {''.join(last)} (the whole log: {log})")


def _start(options: Mapping[str, Any]) -> list[str]:
    free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
    common = {
        # Room, not use: it takes memory as it is filled.
        "object-store-memory": int(free_bytes * _SHARE_OF_SHARED_MEMORY),
        # Ray would subtract that room from the pod's memory, and refuse to start; no role asks for any.
        "memory": _LOGICAL_MEMORY_BYTES,
        # Its own also where a worker's default would be the head's.
        "temp-dir": f"{tempfile.gettempdir()}/ray",
        "include-log-monitor": "false",
        "disable-usage-stats": True,
    }
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start"),
        *(f"--{name}" if value is True else f"--{name}={value}" for name, value in {**options, **common}.items()),
    ]
