"""A Ray of this run's own on this machine, gone with the process that started it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # An actor without a GPU must not see any: Ray leaves the variable alone unless told to set it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_DEDUP_LOGS": "0",
    # All ranks are on this machine: nobody else needs to reach their sockets.
    "GLOO_SOCKET_IFNAME": "lo",
}


_MIB = 1 << 20
_SMALLEST_OBJECT_STORE_BYTES = 128 * _MIB


def object_store_bytes(sync_bucket_bytes: int) -> int:
    """Room in shared memory for a step's rollouts and two buckets of weights: one is read while the next is made."""
    return _SMALLEST_OBJECT_STORE_BYTES + 2 * sync_bucket_bytes


@contextmanager
def local_ray(*, cpus: int, gpus: int, object_store_bytes: int) -> Iterator[None]:
    """Start Ray with room for `cpus` and `gpus` of actors; from then on this process sees no GPU itself."""
    import ray

    os.environ.update(_ENVIRONMENT)
    on_termination = signal.getsignal(signal.SIGTERM)
    ray.init(
        address="local",
        num_cpus=cpus,
        num_gpus=gpus,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    # Ray has put a handler in place that ends the process at once.
    signal.signal(signal.SIGTERM, on_termination)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        ray.shutdown()
