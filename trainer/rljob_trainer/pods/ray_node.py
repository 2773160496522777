"""This pod as a node of the job's Ray cluster, on ports that a network policy can list."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rljob_client.errors import RunError
from rljob_memory.budget.host import object_store_room
from rljob_trainer.errors import WorkerLost
from rljob_trainer.hardware import Bundle
from rljob_trainer.roles.ray_driver import (
    RAY_ENVIRONMENT,
    SAFE_PATH,
    STARTS,
    RayDied,
    change_start_of_raylets,
    start_only_what_is_used,
)

GCS_RECONNECT_SECONDS = 10

_ENVIRONMENT = RAY_ENVIRONMENT | {
    SAFE_PATH: "1",
    # Otherwise the lines of both streams would be out of order in a file.
    "PYTHONUNBUFFERED": "1",
    "RAY_START_HOOK": "rljob_trainer.pods.ray_node.before_start",
    # A node exits after its head has been gone for this long.
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(GCS_RECONNECT_SECONDS),
}
_SHARED_MEMORY = "/dev/shm"
_LOGICAL_MEMORY_BYTES = 1 << 30
_WORKER_PORTS = 200
_LEAVE_SECONDS = 5.0
EXIT_DIED = os.EX_TEMPFAIL
"""Exit code of `ray start` if a process of Ray has died in each start."""
_START_VARIABLE = "RLJOB_RAY_START"
_OTHER_COMMANDS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")
"""Ray's command line works without those that cannot be imported. Their import takes half of its time."""
_A_LITTLE = 0.001
"""Fraction of a worker's own resource: enough to be placed there, and small enough for many requests."""


def ports(first: int) -> dict[str, int]:
    """Every port that Ray listens on in a pod, except the port of the head, by option of `ray start`. The first is that
    of the node manager."""
    return {
        "node-manager-port": first,
        "object-manager-port": first + 1,
        "runtime-env-agent-port": first + 2,
        "dashboard-agent-listen-port": first + 3,
        "dashboard-agent-grpc-port": first + 4,
        "metrics-export-port": first + 5,
        "min-worker-port": first + 20,
        "max-worker-port": first + 20 + _WORKER_PORTS - 1,
    }


def endpoint(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def head_command(*, pod_ip: str, port: int, first_port: int) -> list[str]:
    """`ray start` for the head. It offers no CPU and no GPU, so that no role runs in the controller's pod."""
    return _start(
        0,
        {
            "head": True,
            "port": port,
            "node-ip-address": pod_ip,
            "num-cpus": 0,
            "num-gpus": 0,
            "include-dashboard": "false",
            "no-monitor": True,
            **ports(first_port),
        },
    )


def worker_command(
    *, head: str, pod_ip: str, first_port: int, cpus: int, gpus: int, resource: str, shared_by_others_bytes: int
) -> list[str]:
    """`ray start` for a worker. `head`: address:port of the head. `resource`: a resource that only this worker has.
    `shared_by_others_bytes`: of /dev/shm, for NCCL and vLLM."""
    return _start(
        shared_by_others_bytes,
        {
            "address": head,
            "node-ip-address": pod_ip,
            "num-cpus": cpus,
            "num-gpus": gpus,
            "resources": json.dumps({resource: 1}),
            **ports(first_port),
        },
    )


def worker_resource(index: int) -> str:
    """Name of the Ray resource that places roles in the worker with this number."""
    return f"worker-{index}"


def only_on(worker: int) -> Bundle:
    """A resource request that only the worker with this number can satisfy."""
    return {worker_resource(worker): _A_LITTLE}


def begin(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command`. It exits once the node is up; the processes of the node keep running."""
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **_ENVIRONMENT})


def leave() -> None:
    """Stop the raylet of this pod gracefully, so that the head knows immediately that the node is gone."""
    processes = psutil.Process(os.getppid()).children(recursive=True)  # of the init process, which adopted it
    raylets = [process for process in processes if _is_raylet(process)]
    for raylet in raylets:
        with suppress(psutil.NoSuchProcess):
            raylet.terminate()
    psutil.wait_procs(raylets, timeout=_LEAVE_SECONDS)


def _is_raylet(process: psutil.Process) -> bool:
    try:
        return bool(process.name() == "raylet")
    except psutil.Error:
        return False


def before_start(parameters: Any, head: bool) -> None:
    """Hook of `ray start` for settings without an option.

    Disables the server for remote drivers, which would import Ray again and listen on a port, and the API server. Gives
    the raylet more time to start on a busy machine.
    """
    parameters.ray_client_server_port = None
    change_start_of_raylets()
    start_only_what_is_used()


def require_started(exit_code: int, log: Path) -> None:
    """Raise an error with the last line of the log if `ray start` failed: `WorkerLost` if a process of Ray has died."""
    if exit_code != 0:
        last = log.read_text(errors="replace", encoding="utf-8").strip().splitlines()[-1:]
        failure = WorkerLost if exit_code == EXIT_DIED else RunError
        raise failure(f"Ray did not start (exit code {exit_code}): {''.join(last)} (full log: {log})")


def _start(shared_by_others_bytes: int, options: Mapping[str, Any]) -> list[str]:
    free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
    common = {
        # A capacity: memory is used as it is filled.
        "object-store-memory": object_store_room(free_bytes, shared_by_others_bytes),
        # Ray would subtract the capacity from the pod's memory, and refuse to start. No role requests memory.
        "memory": _LOGICAL_MEMORY_BYTES,
        # Local, also if the default of a worker would be that of the head.
        "temp-dir": f"{tempfile.gettempdir()}/ray",
        "include-log-monitor": "false",
        "disable-usage-stats": True,
    }
    return [
        *(sys.executable, "-m", "rljob_trainer.pods.ray_node", "start"),
        *(f"--{name}" if value is True else f"--{name}={value}" for name, value in {**options, **common}.items()),
    ]


def main() -> None:
    """`ray start`. If a process of Ray dies during the start, Ray is started again."""
    start = int(os.environ.pop(_START_VARIABLE, "1"))
    sys.modules.update(dict.fromkeys(_OTHER_COMMANDS))  # type: ignore[arg-type]
    from ray.scripts.scripts import main as ray

    try:
        ray()
    except RayDied as error:
        print(f"start {start} of {STARTS} failed: {error}", file=sys.stderr, flush=True)
        if start == STARTS:
            sys.exit(EXIT_DIED)
        # In a new program: the modules of Ray's command line keep what the failed start has set.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _START_VARIABLE: str(start + 1)})


if __name__ == "__main__":
    main()
