"""The observer is attached when the program first uses CUDA, if torch supports it."""

from __future__ import annotations

import pytest

from rljob_probe.circumstances import phase_of
from tests.unit.probe.probed_program import SITE, ProbedProgram, write_fake_torch


def test_cuda_is_not_used_until_the_program_uses_it(gpu_program: ProbedProgram) -> None:
    code = "from torch import cuda; print(cuda.used, len(cuda.observers)); cuda.use(); print(len(cuda.observers))"
    assert gpu_program.run(code).output == "False 0\n1\n"


def test_torch_that_was_imported_before_is_observed_too(gpu_program: ProbedProgram) -> None:
    (gpu_program.directory / "sitecustomize.py").write_text("import torch")
    code = "import torch; torch.cuda.use(); print(len(torch.cuda.observers))"
    path = f"{SITE}:{gpu_program.directory}"
    assert gpu_program.run(code, environment={"PYTHONPATH": path}).output == "1\n"


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("_cuda_attach_out_of_memory_observer", "renamed"),
        ("_lazy_call", "renamed"),
        ("class _C:", "class other:"),
        ("memory_stats", "renamed"),
        ("class Optimizer:", "class Other:"),
        ("cuda.observers.append(observer)", "raise RuntimeError('cudaMallocAsync has no observers')"),
    ],
)
def test_a_torch_without_observer_functions_works_as_before(program: ProbedProgram, part: str, instead: str) -> None:
    write_fake_torch(program.directory, part, instead)
    ended = program.run("import torch; torch.cuda.use(); torch.cuda.run_out_of_memory()")
    assert ended.exit_code == 1
    assert ended.errors.endswith("\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert ended.errors.count("Traceback") == 1
    assert program.message is not None


def test_the_source_of_an_error_gives_the_phase(gpu_program: ProbedProgram) -> None:
    generation = gpu_program.directory / "transformers" / "generation"
    generation.mkdir(parents=True)
    (generation.parent / "__init__.py").touch()
    (generation / "__init__.py").touch()
    (generation / "sampling.py").write_text("import torch\ndef sample(): torch.cuda.run_out_of_memory()")
    gpu_program.run("import torch; torch.cuda.use()\nfrom transformers.generation import sampling; sampling.sample()")
    assert gpu_program.message is not None
    assert gpu_program.message.evidence is not None
    assert gpu_program.message.evidence.phase == "rollout"


def test_torchs_thread_of_the_backward_pass_has_no_python_on_its_stack() -> None:
    assert phase_of([]) == "update"
    assert phase_of(["/app/train.py", "/lib/torch/nn/modules/linear.py"]) is None
    assert phase_of(["/lib/torch/optim/adamw.py", "/app/vllm/train.py"]) == "update"
