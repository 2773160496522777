"""The probe in programs whose GPU really runs out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rljob_api.exit_codes import ExitCode
from tests.unit.probe.probed_program import ProbedProgram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

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


@pytest.fixture
def program(tmp_path: Path) -> ProbedProgram:
    return ProbedProgram(tmp_path)


def test_an_uncaught_error_is_reported_with_the_allocators_numbers(program: ProbedProgram) -> None:
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


def test_an_error_in_the_backward_pass_is_of_the_update_and_of_its_step(program: ProbedProgram) -> None:
    program.run(TOO_MUCH_BACKWARD)
    assert program.message is not None
    assert program.message.evidence is not None
    assert program.message.evidence.phase == "update"
    assert program.message.evidence.step == 4


def test_an_error_that_was_caught_is_told_unless_it_was_outlived(program: ProbedProgram) -> None:
    program.run(f"{CAUGHT}{STEP}sys.exit(1)")
    assert program.message is None
    program.run(f"{CAUGHT}sys.exit(1)")
    assert program.message is not None
    assert program.message.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY


def test_a_program_that_has_enough_behaves_as_without_the_probe(program: ProbedProgram) -> None:
    code = "import torch; print(torch.ones(3, device='cuda').sum().item(), torch.cuda.memory_allocated())"
    for flags in ((), ("-W", "error::UserWarning")):
        assert program.run(code, *flags) == program.run(code, *flags, probed=False)
