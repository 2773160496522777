"""The probe in programs with the real torch, alone and in several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from tests.unit.probe.probed_program import ProbedProgram

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


def test_importing_torch_warns_and_fails_as_without_the_probe(program: ProbedProgram) -> None:
    code = "import warnings, torch\nwarnings.warn('mine')\nprint(torch.ones(2).sum(), torch.cuda.is_available())"
    for flags in ((), ("-W", "error::UserWarning")):
        assert program.run(code, *flags) == program.run(code, *flags, probed=False)


def test_host_memory_in_a_step_is_told_with_the_step_and_its_phase(program: ProbedProgram) -> None:
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


def test_a_spawned_rank_that_fails_is_told_once(program: ProbedProgram) -> None:
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


def test_the_rank_that_fails_under_torchrun_is_the_one_that_is_told(program: ProbedProgram) -> None:
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


def test_compiled_functions_and_loaders_with_workers_work_as_ever(program: ProbedProgram) -> None:
    code = """
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(float(index))

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2)
    double = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
    print(sum(double(batch).sum() for batch in loader))
"""
    assert program.run(code) == program.run(code, probed=False)
