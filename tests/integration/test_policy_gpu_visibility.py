"""The policy's process sees its GPU, the controller none. Ray is started with a GPU that need not exist."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray

from rljob_memory.planning.shared_memory import object_store_bytes
from rljob_trainer.roles.ray_driver import start_local_ray


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a controller on a machine with one GPU."""
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    start_local_ray(cpus=2, gpus=1, object_store_bytes=object_store_bytes(1 << 20, "cpu"))
    yield
    ray.shutdown()


@pytest.mark.usefixtures("controller")
def test_only_a_role_that_asks_for_a_gpu_sees_one() -> None:
    def visible_gpus() -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    assert visible_gpus() == "", "a stray call in the controller could put a CUDA context on GPU 0"
    role = ray.remote(visible_gpus)
    assert ray.get(role.options(num_gpus=0.5).remote()) == "0"
    assert ray.get(role.options(num_gpus=0).remote()) == ""
