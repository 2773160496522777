"""This process as the driver of a Ray cluster."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

from rljob_trainer.errors import WorkerLost

_MIB = 1 << 20
_SMALLEST_OBJECT_STORE_BYTES = 128 * _MIB
_RAYLET_SECONDS = 120
_TOO_SLOW = "timed out during startup"
"""Of ray._private.node.Node, which raises a bare `Exception`."""

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Each role's processes have an environment of their own: none that was started beforehand would fit.
    "RAY_prestart_worker_first_driver": "0",
}
_LOCAL_ENVIRONMENT = RAY_ENVIRONMENT | {
    # An actor without a GPU must not see any: Ray leaves the variable alone unless told to set it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # All ranks are on this machine: nobody else needs to reach their sockets.
    "GLOO_SOCKET_IFNAME": "lo",
}


def object_store_bytes(sync_bucket_bytes: int) -> int:
    """Room in shared memory for a step's rollouts and two buckets of weights: one is read while the next is made."""
    return _SMALLEST_OBJECT_STORE_BYTES + 2 * sync_bucket_bytes


def wait_longer_for_raylets() -> None:
    """Have this process give the raylets that it starts two minutes to register.

    Ray gives them 30 seconds, for which it has no setting (ray._private.node.Node), and two busy cores can take longer.
    """
    from ray._private import services

    ask = services.get_node
    if hasattr(ask, "__wrapped__"):
        return

    @functools.wraps(ask)
    def ask_patiently(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + _RAYLET_SECONDS
        while True:
            try:
                return ask(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    services.get_node = ask_patiently


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
    """Start a Ray of this run's own on this machine, with room for `cpus` and `gpus` of actors. It ends with this
    process, or at `ray.shutdown()`. Raises `WorkerLost` where it does not come up in time."""
    os.environ.update(_LOCAL_ENVIRONMENT)
    wait_longer_for_raylets()
    start_only_what_is_used()
    try:
        connect(
            "local",
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
        )
    except Exception as error:
        if _TOO_SLOW not in str(error):
            raise
        raise WorkerLost(
            f"Ray's own processes did not come up within {_RAYLET_SECONDS} seconds: this machine is too busy"
        ) from None


def connect(address: str, **options: Any) -> None:
    """`ray.init` at `address`; from then on this process sees no GPU itself, and its signals are its own again."""
    import ray

    on_termination = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    # Ray has put a handler in place that ends the process at once.
    signal.signal(signal.SIGTERM, on_termination)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
