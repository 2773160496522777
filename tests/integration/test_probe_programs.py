"""The probe in the programs that it is for: any Python, the real torch on CPU and GPU, and a real vLLM."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rljob_api.exit_codes import ExitCode
from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import read_evidence
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout.config import engine_environment
from tests.unit.probe.probed_program import ProbedProgram

PROGRAM = """
import sys
class Torch(RuntimeError): pass
Torch.__name__ = "OutOfMemoryError"
raise Torch("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


def pythons() -> list[Path]:
    """Those of pyenv, and those on the path."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(versions.glob("*/bin/python"))
    on_path = [shutil.which(name, path="/usr/bin:/usr/local/bin") for name in ("python2", "python3")]
    return found + [Path(path) for path in on_path if path]


def version(python: Path) -> tuple[int, int]:
    code = "import sys; print('%d %d' % sys.version_info[:2])"
    major, minor = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return int(major), int(minor)


@pytest.mark.parametrize("python", pythons(), ids=str)
def test_the_probe_reports_a_failure_since_3_8_and_never_changes_it(python: Path, tmp_path: Path) -> None:
    program = ProbedProgram(tmp_path, python=python)
    for flags in ((), ("-W", "error"), ("-S",), ("-E",)):
        assert program.run("print('well')", *flags) == program.run("print('well')", *flags, probed=False)
    assert program.run(PROGRAM) == program.run(PROGRAM, probed=False)
    if version(python) < (3, 8):
        assert program.message is None
    else:
        assert program.message is not None
        assert program.message.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY


TOO_MUCH = "torch.empty(1 << 55)"


@pytest.fixture
def program(tmp_path: Path) -> ProbedProgram:
    return ProbedProgram(tmp_path)


def test_torch_is_watched_from_its_import_on_and_cuda_is_not_touched(program: ProbedProgram) -> None:
    ended = program.run("""
import torch
waiting = [call.__qualname__ for call, _ in torch.cuda._queued_calls if call.__module__.startswith("rljob_probe")]
print(waiting, torch.cuda.is_initialized())
""")
    assert ended.output == "['observe.<locals>.attach_observer'] False\n"


def test_host_memory_is_reported_with_step_and_phase(program: ProbedProgram) -> None:
    program.run(f"""
import torch

class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        if optimizer.state and optimizer.state[layer.weight]["step"] == 3:
            {TOO_MUCH}
        return gradient

layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(10):
    Greedy.apply(layer(torch.ones(2, 4))).sum().backward()
    optimizer.step()
""")
    message = program.message
    assert message is not None
    assert message.exit_code == ExitCode.HOST_OUT_OF_MEMORY
    assert message.evidence is not None
    assert message.evidence.step == 4
    assert message.evidence.phase == "update"
    assert "you tried to allocate" in message.evidence.message


def test_a_spawned_rank_that_fails_is_reported_once(program: ProbedProgram) -> None:
    ended = program.run(f"""
import torch, torch.multiprocessing

def rank(index):
    if index == 1:
        {TOO_MUCH}

if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, nprocs=2)
""")
    assert ended.exit_code == 1
    assert program.message is not None
    assert program.message.exit_code == ExitCode.HOST_OUT_OF_MEMORY


def test_the_rank_that_fails_under_torchrun_is_reported(program: ProbedProgram) -> None:
    (program.directory / "rank.py").write_text(f"""
import os, time, torch
if os.environ["RANK"] == "1":
    {TOO_MUCH}
time.sleep(600)
""")
    code = f"""
from torch.distributed.run import main
main(["--nproc-per-node=2", "--standalone", {str(program.directory / "rank.py")!r}])
"""
    ended = program.run(code)
    assert ended.exit_code == 1
    assert program.message is not None
    assert program.message.evidence is not None
    assert program.message.evidence.rank == 1


def test_torch_works_warns_and_fails_as_without_the_probe(program: ProbedProgram) -> None:
    code = """
import warnings
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(float(index))

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2)
    double = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
    print(sum(double(batch).sum() for batch in loader), torch.cuda.is_available())
    warnings.warn('mine')
"""
    for flags in ((), ("-W", "error::UserWarning")):
        assert program.run(code, *flags) == program.run(code, *flags, probed=False)


ENGINE = """
if __name__ == "__main__":
    from vllm import LLM
    LLM(model={model!r}, load_format="dummy", dtype="float32", max_model_len=2048, kv_cache_memory_bytes=1 << 17,
        enforce_eager=True)
"""


@pytest.mark.long
def test_an_engine_whose_own_process_lacks_memory_to_start_is_reported(tmp_path: Path) -> None:
    model = resolve_model("random://qwen3?hidden=64&layers=2&vocabulary=1000&dtype=float32")
    environment = engine_environment("cpu") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    program = ProbedProgram(tmp_path, environment)
    ended = program.run(ENGINE.format(model=str(model)))
    assert "Engine core initialization failed" in ended.errors, ended.errors
    assert program.message is not None
    assert program.message.evidence is not None
    assert "No available memory for the cache blocks" in program.message.message
    failure = program.message.evidence.failure
    assert failure is not None
    assert any(frame.endswith(" in run_engine_core") for frame in failure.stack), failure.stack
    assert diagnose(read_evidence(program.log))[0].failure_class is FailureClass.KV_CACHE_OVERSIZED


TOO_MUCH_FORWARD = """
import torch
kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
"""
TOO_MUCH_BACKWARD = """
import torch

class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        return gradient

layer = torch.nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
for step in range(3):
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
Greedy.apply(layer(torch.ones(2, 4, device="cuda"))).sum().backward()
"""
CAUGHT = """
import sys, torch
layer = torch.nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
try:
    torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
"""
STEP = "layer(torch.ones(2, 4, device='cuda')).sum().backward(); optimizer.step()\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnAGpu:
    def test_an_uncaught_error_is_reported_with_the_allocators_numbers(self, program: ProbedProgram) -> None:
        assert program.run(TOO_MUCH_FORWARD).exit_code == 1
        message = program.message
        assert message is not None
        assert message.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY
        assert message.evidence is not None
        assert "CUDA out of memory. Tried to allocate 4096.00 GiB." in message.evidence.message
        memory = message.evidence.memory
        assert memory is not None
        assert 1 << 30 <= memory.allocated_bytes <= memory.reserved_bytes < memory.device_total_bytes
        assert 0 < memory.device_free_bytes < memory.device_total_bytes

    def test_an_error_in_the_backward_pass_is_of_the_update_and_of_its_step(self, program: ProbedProgram) -> None:
        program.run(TOO_MUCH_BACKWARD)
        assert program.message is not None
        assert program.message.evidence is not None
        assert program.message.evidence.phase == "update"
        assert program.message.evidence.step == 4

    def test_a_caught_error_is_reported_unless_the_program_continued(self, program: ProbedProgram) -> None:
        program.run(f"{CAUGHT}{STEP}sys.exit(1)")
        assert program.message is None
        program.run(f"{CAUGHT}sys.exit(1)")
        assert program.message is not None
        assert program.message.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY

    def test_a_program_that_has_enough_behaves_as_without_the_probe(self, program: ProbedProgram) -> None:
        code = "import torch; print(torch.ones(3, device='cuda').sum().item(), torch.cuda.memory_allocated())"
        for flags in ((), ("-W", "error::UserWarning")):
            assert program.run(code, *flags) == program.run(code, *flags, probed=False)
