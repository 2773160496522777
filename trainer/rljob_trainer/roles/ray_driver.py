"""Start Ray, or connect to it, with this process as its driver."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rljob_client.errors import BadInput
from rljob_trainer.errors import WorkerLost
from rljob_trainer.roles.warm import setup_worker

STARTS = 3
"""Maximum number of starts of Ray, if one of its processes dies each time."""
_RAYLET_SECONDS = 120
_TOO_SLOW = "timed out during startup"
"""Part of the message of ray._private.node.Node, which raises a bare `Exception`."""
_LONG_PATH = "AF_UNIX path length"
"""Part of the message of ray._private.node.Node about the path of a socket, which depends on TMPDIR."""

SAFE_PATH = "PYTHONSAFEPATH"
"""Set for Ray's processes: they and their children import nothing from the working directory."""

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Each role needs its own environment, so that prestarted workers could not be used.
    "RAY_prestart_worker_first_driver": "0",
}
_LOCAL_ENVIRONMENT = RAY_ENVIRONMENT | {
    # An actor without a GPU must not see any: Ray does not change the variable unless configured to.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # All ranks are on this machine: their sockets need not be reachable from outside.
    "GLOO_SOCKET_IFNAME": "lo",
}


class RayDied(Exception):
    """A process of Ray that this process started ended before its raylet had registered."""


def change_start_of_raylets() -> None:
    """Have raylets that this process starts start their workers with `setup_worker`, and give them two minutes to
    register. If one dies before that, raise `RayDied`.

    Ray allows 30 seconds and has no setting for it (ray._private.node.Node). A busy machine with two cores needs more.
    Ray does not check whether the raylet still runs. A raylet exits if its agents take longer than 15 seconds to start,
    and Ray has no setting for that either (https://github.com/ray-project/ray/issues/65983).
    """
    from ray._private import node, services

    ask, start = services.get_node, node.Node.start_ray_processes
    if hasattr(ask, "__wrapped__"):
        return
    starting: list[node.Node] = []

    @functools.wraps(start)
    def start_and_remember(self: node.Node) -> None:
        self._ray_params.setup_worker_path = setup_worker.__file__
        start(self)
        starting[:] = [self]

    @functools.wraps(ask)
    def ask_patiently(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + _RAYLET_SECONDS
        while True:
            try:
                return ask(gcs_address, node_id)
            except RuntimeError:
                for started in starting:
                    _require_alive(started)
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    node.Node.start_ray_processes = start_and_remember
    services.get_node = ask_patiently


def _require_alive(node: Any) -> None:
    """Raise `RayDied`, and end what is left of the node, if one of its processes is dead."""
    dead = [f"{name} with exit code {process.returncode}" for name, process in node.dead_processes()]
    if dead:
        node.kill_all_processes(check_alive=False, wait=True)
        raise RayDied(f"{' and '.join(dead)}, logs in {node.get_logs_dir_path()}")


def start_only_what_is_used() -> None:
    """Have this process start no API server, no log monitor and no autoscaler for the Ray that it starts.

    Without a dashboard the API server only reports usage statistics, which are off, yet `ray.init` waits for it; nobody
    reads the monitored logs, and the nodes are given. Each costs a second of processor time at the start of a run, and
    `ray.init` has options for none of them.
    """
    from ray._private import node, services

    services.start_api_server = _start_nothing
    node.Node.start_log_monitor = _start_nothing
    node.Node.start_monitor = _start_nothing


def _start_nothing(*_arguments: Any, **_options: Any) -> tuple[None, None]:
    """Neither the address nor the process of an API server, as Ray has it where that could not be started."""
    return None, None


def start_local_ray(*, cpus: int, gpus: int, object_store_bytes: int) -> None:
    """Start a Ray cluster for this run on this machine. It ends with this process, or at `ray.shutdown()`.

    `cpus`, `gpus`: logical resources for actors. If a process of Ray dies during the start, Ray is started again, up
    to three times in all. Raises `WorkerLost` if Ray does not start in time, `BadInput` if it cannot use its directory.
    """
    os.environ.update(_LOCAL_ENVIRONMENT)
    change_start_of_raylets()
    start_only_what_is_used()
    for start in range(1, STARTS + 1):
        try:
            with _safe_path():
                return connect(
                    "local",
                    num_cpus=cpus,
                    num_gpus=gpus,
                    object_store_memory=object_store_bytes,
                    include_dashboard=False,
                )
        except RayDied as error:
            if start == STARTS:
                raise WorkerLost(
                    f"expected Ray to start, but each of {STARTS} times one of its processes ended (last: {error}); "
                    "the machine may be too busy: retry"
                ) from None
        except Exception as error:
            if isinstance(error, OSError) and (error.filename is not None or _LONG_PATH in str(error)):
                raise BadInput(
                    f"expected a directory for the files and sockets of Ray, found {error}; set RAY_TMPDIR to a "
                    "directory with a short path that this user can write to, such as /tmp"
                ) from error
            if _TOO_SLOW not in str(error):
                raise
            raise WorkerLost(
                f"expected Ray to start within {_RAYLET_SECONDS} seconds, it did not; "
                "the machine may be too busy: retry"
            ) from None


def local_ray_runs() -> bool:
    """True if this process started Ray and all of Ray's processes are running."""
    from ray._private import worker

    node = worker._global_node
    return node is not None and not node.dead_processes()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Set `SAFE_PATH` in the block: programs that the user's code starts later import as usual."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        del os.environ[SAFE_PATH]
        if before is not None:
            os.environ[SAFE_PATH] = before


class _OwnImportPath(list[str]):
    """Directories that Ray puts before all others on the import path of its workers: only those of this process.

    Ray adds the working directory, where a user's `numbers.py` would replace the module of the standard library.
    """

    def extend(self, paths: Iterable[str]) -> None:
        super().extend(path for path in paths if path in sys.path)


def connect(address: str, **options: Any) -> None:
    """Connect to Ray at `address`. Afterwards this process sees no GPU, and has its own signal handlers again."""
    import ray

    on_termination = signal.getsignal(signal.SIGTERM)
    config = ray.job_config.JobConfig()
    config._py_driver_sys_path = _OwnImportPath()
    ray.init(address=address, log_to_driver=False, configure_logging=False, job_config=config, **options)
    # Ray has installed a handler that exits immediately.
    signal.signal(signal.SIGTERM, on_termination)
    hide_gpus()


def hide_gpus() -> None:
    """Have this process see no GPU: the roles have them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
