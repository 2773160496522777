"""The imports with which role processes on GPUs are forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rljob_trainer.roles.warm.server import SERVER_ENVIRONMENT
from rljob_trainer.rollout.config import engine_environment

_IMPORT = """
import itertools, json, sys
import torch
from rljob_trainer.roles.warm import server
torch.cuda.is_available = None  # the answer would initialize CUDA
role = sys.argv[1]
of_device = server.OF_DEVICE["policy", "cuda"] if role == "policy" else []  # this vLLM is for CPUs
server._import([*server._SHARED, *itertools.chain(*server.MODULES[role], *of_device)], [9, 0])
known = ["vllm", *server.IMPORTED_IN_FORKS]
print(json.dumps([server.obstacle_to_forks(), [name for name in known if name in sys.modules]]))
"""

# The vLLM of these tests is built for CPUs. It has no modules for GPUs, but the same questions to NVML.
_ASK = """
import json
import torch
from rljob_trainer.roles.warm.gpu_answers import gpus_answered
with gpus_answered([9, 0]):
    import vllm.platforms
    from vllm.third_party import pynvml
    vllm.platforms.cuda_platform_plugin()
    pynvml.nvmlInit()
    gpus = pynvml.nvmlDeviceGetCount()
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    loaded = pynvml.nvmlLib is not None
print(json.dumps([gpus, capability, loaded, pynvml.nvmlInit.__module__ == pynvml.__name__]))
"""


def printed(program: str, role: str = "rollout") -> Any:
    variables = {**os.environ, **(engine_environment("cuda") if role == "rollout" else {}), **SERVER_ENVIRONMENT}
    command = [sys.executable, "-c", program, role]
    return json.loads(subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize("role", ["policy", "rollout"])
def test_modules_before_vllm_leave_it_and_threads_to_the_fork(role: str) -> None:
    assert printed(_IMPORT, role) == [None, []]


def test_vllm_asks_for_gpus_without_loading_nvml() -> None:
    assert printed(_ASK) == [1, [9, 0], False, True]
