"""The probe reports a vLLM engine that lacks the memory to start, and errors that Ray brings from another process."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import read_evidence
from rljob_probe.engine_start import CHECKS
from tests.unit.probe.probed_program import ProbedProgram

REFUSED = (
    "Free memory on device cuda:0 (80.12/139.8 GiB) on startup is less than desired GPU memory utilization "
    "(0.98, 137.0 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
NO_ROOM = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine"
)

# As in verl: the engine's process logs the error, its parent gets another one, and hydra ends the first process.
ENGINE_OF_ITS_OWN = """
import multiprocessing, os, sys

def engine(module, check):
    import torch
    try:
        getattr(__import__(module, fromlist=[check]), check)()
    except ValueError:
        os._exit(1)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=engine, args=({module!r}, {check!r}))
    process.start()
    process.join()
    sys.exit(1)
"""
RAY = """
class RayError(Exception): pass
class RayTaskError(RayError): pass
class OutOfMemoryErrorOfTheTask(RayTaskError, RuntimeError): pass
"""


def write_vllm(directory: Path, message: str, names: dict[str, str] = CHECKS) -> None:
    """A vLLM whose checks fail, unless they are called with True."""
    for module, check in names.items():
        path = directory / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in (path.parent, path.parent.parent, path.parent.parent.parent):
            (package / "__init__.py").touch()
        path.write_text(f"def {check}(enough=False):\n    if not enough: raise ValueError({message!r})\n")


@pytest.mark.parametrize(("module", "message"), zip(CHECKS, (REFUSED, NO_ROOM), strict=True))
def test_an_engine_that_cannot_start_is_reported_by_the_first_process(
    gpu_program: ProbedProgram, module: str, message: str
) -> None:
    write_vllm(gpu_program.directory, message)
    ended = gpu_program.run(ENGINE_OF_ITS_OWN.format(module=module, check=CHECKS[module]))
    assert (ended.exit_code, ended.errors) == (1, "")
    assert gpu_program.message is not None
    assert gpu_program.message.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY
    assert gpu_program.message.evidence is not None
    assert message in gpu_program.message.evidence.message
    assert "in engine" in gpu_program.message.evidence.message, "the caller is in the stack"
    assert FailureClass.KV_CACHE_OVERSIZED in {
        found.failure_class for found in diagnose(read_evidence(gpu_program.log))
    }


def test_an_engine_of_another_version_starts_as_without_the_probe(gpu_program: ProbedProgram) -> None:
    write_vllm(gpu_program.directory, REFUSED, dict.fromkeys(CHECKS, "another_name"))
    ended = gpu_program.run("\n".join(["import torch", *(f"import {module}" for module in CHECKS)]))
    assert (ended.exit_code, ended.errors, gpu_program.message) == (0, "", None)


def test_an_engine_that_starts_at_the_second_try_is_not_reported(gpu_program: ProbedProgram) -> None:
    write_vllm(gpu_program.directory, REFUSED)
    code = """
import torch
from vllm.v1.worker.utils import request_memory
try:
    request_memory()
except ValueError:
    request_memory(True)
"""
    assert gpu_program.run(code).exit_code == 0
    assert gpu_program.message is None


def test_the_evidence_of_a_rays_task_is_that_of_its_process(gpu_program: ProbedProgram) -> None:
    (gpu_program.directory / "exceptions_of_ray.py").write_text(RAY)
    child = "import os, torch\ntorch.cuda.use()\ntry: torch.cuda.run_out_of_memory()\nexcept RuntimeError: os._exit(1)"
    code = f"""
import os, subprocess, sys
from exceptions_of_ray import OutOfMemoryErrorOfTheTask
subprocess.run([sys.executable, "-c", {child!r}], cwd={str(gpu_program.directory)!r})
raise OutOfMemoryErrorOfTheTask("ray::WorkerDict.update() torch.OutOfMemoryError: CUDA out of memory. Tried to")
"""
    assert gpu_program.run(code).exit_code == 1
    assert gpu_program.message is not None
    assert gpu_program.message.evidence is not None
    assert gpu_program.message.evidence.memory is not None
    assert gpu_program.message.evidence.memory.device_total_bytes == 8 << 30


def test_an_error_of_ray_without_a_note_is_reported_by_its_cause(program: ProbedProgram) -> None:
    (program.directory / "exceptions_of_ray.py").write_text(RAY)
    code = """
from exceptions_of_ray import RayTaskError
error = RayTaskError("ray::WorkerDict.update() and a long traceback: CUDA out of memory")
error.cause = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
raise error
"""
    program.run(code)
    assert program.message is not None
    assert program.message.message.endswith("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("module", CHECKS)
def test_the_installed_vllm_has_the_checks(module: str) -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations
    source = Path(found.submodule_search_locations[0]).joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    assert CHECKS[module] in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
