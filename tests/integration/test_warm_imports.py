"""The imports with which role processes on GPUs are forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
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
of_device = server.OF_DEVICE["policy", "cuda"][:1] if role == "policy" else []  # this vLLM is for CPUs
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

_ATTENTION = """
import json, sys
import torch
from rljob_trainer.policy import flash_attention_4
from rljob_trainer.roles.warm import server
torch.cuda.is_available = None
asks_torch = torch.cuda.get_device_capability
server._import(server.OF_DEVICE["policy", "cuda"][1], [9, 0])
left = ["vllm" in sys.modules, torch.cuda.get_device_capability is asks_torch]
print(json.dumps([flash_attention_4.kernels().CAPABILITY, server.obstacle_to_forks(), *left]))
"""

_PICKLER = """
import json, pickle, sys
from rljob_trainer.roles.warm import server
server._import([*server._SHARED, "torch.fx._graph_pickler"], [9, 0])
import dill
print(json.dumps(issubclass(sys.modules["torch.fx._graph_pickler"].GraphPickler, pickle.Pickler)))
"""


def printed(program: str, role: str = "rollout", **changed: str) -> Any:
    of_role = engine_environment("cuda") if role == "rollout" else {}
    variables = {**os.environ, **of_role, **SERVER_ENVIRONMENT, **changed}
    command = [sys.executable, "-c", program, role]
    return json.loads(subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize("role", ["policy", "rollout"])
def test_modules_before_vllm_leave_it_and_threads_to_the_fork(role: str) -> None:
    assert printed(_IMPORT, role) == [None, []]


def test_vllm_asks_for_gpus_without_loading_nvml() -> None:
    assert printed(_ASK) == [1, [9, 0], False, True]


def test_graphs_are_not_pickled_by_code_in_python() -> None:
    assert printed(_PICKLER) is True


def test_attention_kernels_are_imported_without_vllm_and_a_gpu(tmp_path: Path) -> None:
    kernels = tmp_path / "vllm" / "vllm_flash_attn" / "cute" / "interface.py"  # this vLLM has none
    kernels.parent.mkdir(parents=True)
    kernels.write_text("import torch\nCAPABILITY = torch.cuda.get_device_capability()\n")
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('vLLM changes the compiler')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert printed(_ATTENTION, "policy", PYTHONPATH=path) == [[9, 0], None, False, True]
