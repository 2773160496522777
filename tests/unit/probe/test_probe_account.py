"""The probe's account of a failing process and of engines that cannot start, and the diagnosis that follows from it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_failure import Activity
from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import CollectedEvidence, read_evidence
from rljob_probe import account
from rljob_probe.circumstances import phase_of
from rljob_probe.observer import CHECKS
from tests.unit.probe.probed_program import ProbedProgram

GIB = 1 << 30
FAIL = "torch.cuda.run_out_of_memory()"


def evidence_of(program: ProbedProgram, code: str) -> CollectedEvidence:
    program.run(code)
    assert program.message is not None
    return read_evidence(program.log)


def test_the_stack_names_the_activity_and_unknown_processes_are_foreign(gpu_program: ProbedProgram) -> None:
    code = f"import torch; torch.cuda.use()\ndef push_weights_to_vllm(): {FAIL}\npush_weights_to_vllm()"
    evidence = evidence_of(gpu_program, code)
    assert evidence.failure is not None
    assert evidence.failure.activity is Activity.WEIGHT_SYNC
    assert evidence.siblings == ()
    assert diagnose(evidence)[0].failure_class is FailureClass.FOREIGN_PROCESS


def test_torchs_thread_of_the_backward_pass_has_no_python_on_its_stack() -> None:
    assert account.places_of_frames(None)[0][2] == "places_of_frames"
    assert phase_of([]) == "update"
    assert phase_of(["/app/train.py", "/lib/torch/nn/modules/linear.py"]) is None
    assert phase_of(["/lib/torch/optim/adamw.py", "/app/vllm/train.py"]) == "update"


STEPS = """
import sys, torch
torch.cuda.use()
sys.modules["rljob_probe.samples"].SECONDS_BETWEEN_SAMPLES = %s
optimizer = torch.optim.Optimizer()
for step in range(90):
    torch.cuda.allocated = (1 << 30) + step * (60 << 20)
    optimizer.step()
torch.cuda.run_out_of_memory()
"""


@pytest.mark.parametrize(("seconds", "samples"), [(0, 32), (1e9, 2)])
def test_a_steady_climb_over_the_sampled_steps_is_a_leak(
    gpu_program: ProbedProgram, seconds: float, samples: int
) -> None:
    evidence = evidence_of(gpu_program, STEPS % seconds)
    [series] = evidence.series
    assert len(series.samples) == samples
    if not seconds:
        found = diagnose(evidence)[0]
        assert found.failure_class is FailureClass.RETAINED_GRAPH
        assert found.numbers["allocated_last_bytes"] == pytest.approx(GIB + 89 * (60 << 20), rel=0.01)


ENGINE = """
import gc, sys, types, torch
torch.cuda.use()
sys.modules["vllm"] = types.ModuleType("vllm")

class Storage:
    def data_ptr(self): return id(self)
    def nbytes(self): return 5 << 29

class Tensor:
    storage = Storage()
    def untyped_storage(self): return self.storage

class GPUModelRunner: kv_caches = [Tensor(), Tensor()]
class UniProcExecutor: is_sleeping = %s

runner, executor = GPUModelRunner(), UniProcExecutor()
runner.kv_caches = [Tensor(), Tensor()]
gc.freeze()  # as vLLM does once an engine has started
torch.cuda.run_out_of_memory()
"""


@pytest.mark.parametrize("asleep", [False, True])
def test_an_engine_in_the_process_is_blamed_only_if_it_is_awake(gpu_program: ProbedProgram, asleep: bool) -> None:
    evidence = evidence_of(gpu_program, ENGINE % asleep)
    assert evidence.engine.asleep == asleep
    found = diagnose(evidence)
    if asleep:
        assert FailureClass.ENGINE_NOT_ASLEEP not in {one.failure_class for one in found}
    else:
        assert found[0].failure_class is FailureClass.ENGINE_NOT_ASLEEP
        assert found[0].numbers["kv_cache_bytes"] == 5 * GIB // 2


def test_a_part_of_the_account_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_other_processes", lambda: 1 / 0)
    found = account.account([("/a/b.py", 3, "step")], torch=object())
    assert (found["kind"], found["stack"]) == ("Unfamiliar", ["/a/b.py in step"])


# --- a vLLM engine that lacks the memory to start ---

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
    assert message in gpu_program.evidence.message
    account = gpu_program.evidence.failure
    assert account is not None
    assert any(frame.endswith("in engine") for frame in account.stack), "the caller is in the stack"
    found = diagnose(read_evidence(gpu_program.log))
    assert FailureClass.KV_CACHE_OVERSIZED in {one.failure_class for one in found}


def test_an_engine_of_trl_that_refuses_to_start_has_trls_advice(program: ProbedProgram) -> None:
    package = program.directory / "site-packages" / "trl" / "trainer"
    package.mkdir(parents=True)
    (package / "grpo_trainer.py").write_text(f"raise ValueError({REFUSED!r})")
    evidence = evidence_of(program, f"import sys; sys.path.insert(0, {str(package)!r}); import grpo_trainer")
    found = diagnose(evidence)[0]
    assert found.failure_class is FailureClass.KV_CACHE_OVERSIZED
    assert "TRL: lower vllm_gpu_memory_utilization" in found.advice


def test_an_engine_of_another_version_starts_as_without_the_probe(gpu_program: ProbedProgram) -> None:
    write_vllm(gpu_program.directory, REFUSED, dict.fromkeys(CHECKS, "another_name"))
    ended = gpu_program.run("\n".join(["import torch", *(f"import {module}" for module in CHECKS)]))
    assert (ended.exit_code, ended.errors, gpu_program.message) == (0, "", None)


def test_an_engine_that_starts_at_the_second_try_is_not_reported(gpu_program: ProbedProgram) -> None:
    write_vllm(gpu_program.directory, REFUSED)
    code = "try: request_memory()\nexcept ValueError: request_memory(True)"
    assert gpu_program.run(f"import torch\nfrom vllm.v1.worker.utils import request_memory\n{code}").exit_code == 0
    assert gpu_program.message is None


def test_the_installed_vllm_has_the_checks() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations
    for module, check in CHECKS.items():
        file = Path(found.submodule_search_locations[0]).joinpath(*module.split(".")[1:]).with_suffix(".py")
        functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        assert check in {function.name for function in functions}


# --- errors that Ray brings from another process ---

RAY = """
class RayError(Exception): pass
class RayTaskError(RayError): pass
class OutOfMemoryErrorOfTheTask(RayTaskError, RuntimeError): pass
"""


def test_the_evidence_of_a_task_of_ray_is_that_of_its_process(gpu_program: ProbedProgram) -> None:
    (gpu_program.directory / "exceptions_of_ray.py").write_text(RAY)
    child = f"import os, torch\ntorch.cuda.use()\ntry: {FAIL}\nexcept RuntimeError: os._exit(1)"
    ended = gpu_program.run(f"""
import os, subprocess, sys
from exceptions_of_ray import OutOfMemoryErrorOfTheTask
subprocess.run([sys.executable, "-c", {child!r}], cwd={str(gpu_program.directory)!r})
raise OutOfMemoryErrorOfTheTask("ray::WorkerDict.update() torch.OutOfMemoryError: CUDA out of memory. Tried to")
""")
    assert ended.exit_code == 1
    assert gpu_program.evidence.memory is not None
    assert gpu_program.evidence.memory.device_total_bytes == 8 << 30


def test_an_error_of_ray_without_a_note_is_reported_by_its_cause(program: ProbedProgram) -> None:
    (program.directory / "exceptions_of_ray.py").write_text(RAY)
    program.run("""
from exceptions_of_ray import RayTaskError
error = RayTaskError("ray::WorkerDict.update() and a long traceback: CUDA out of memory")
error.cause = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
raise error
""")
    assert program.message is not None
    assert program.message.message.endswith("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB.")
