"""The probe reports programs that exit because memory ran out, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_memory.evidence.allocator_message import parse_allocator_message
from rljob_probe import cgroup
from rljob_probe.explanation import report_exit
from tests.unit.probe.probed_program import ProbedProgram

GIB = 1 << 30

OUT_OF_GPU_MEMORY = """
import torch
torch.cuda.use()
torch.cuda.run_out_of_memory()
"""

CAUGHT = """
import sys, torch
optimizer = torch.optim.Optimizer()
torch.cuda.use()
try:
    torch.cuda.run_out_of_memory()
except torch.OutOfMemoryError:
    pass
"""


def test_an_uncaught_gpu_error_is_reported_with_allocator_numbers(gpu_program: ProbedProgram) -> None:
    ended = gpu_program.run(OUT_OF_GPU_MEMORY, environment={"RANK": "3", "RLJOB_ATTEMPT": "2", "RLJOB_ROLE": "policy"})

    assert ended.exit_code == 1
    assert ended.errors.endswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    message = gpu_program.message
    assert message is not None
    assert message.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY
    assert "rank 3 ran out of GPU memory" in message.message
    evidence = message.evidence
    assert evidence is not None
    assert (evidence.rank, evidence.role, evidence.attempt, evidence.step) == (3, "policy", 2, 1)
    first_line, *account = evidence.message.splitlines()
    assert first_line == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert account[1].endswith("in run_out_of_memory")
    memory = evidence.memory
    assert memory is not None
    assert (memory.allocated_bytes, memory.reserved_bytes) == (3 * GIB, 4 * GIB)
    assert (memory.peak_allocated_bytes, memory.peak_reserved_bytes) == (5 * GIB, 6 * GIB)
    assert (memory.device_free_bytes, memory.device_total_bytes) == (1 * GIB, 8 * GIB)
    assert memory.peak_rss_bytes > 0


@pytest.mark.parametrize("way_out", ["sys.exit(1)", "raise SystemExit('cannot go on')", "raise ValueError('and so')"])
def test_a_caught_error_that_ends_the_program_is_reported(gpu_program: ProbedProgram, way_out: str) -> None:
    ended = gpu_program.run(CAUGHT + way_out)

    assert ended.exit_code == 1
    assert gpu_program.message is not None
    assert gpu_program.message.evidence is not None
    seen = parse_allocator_message(gpu_program.message.evidence.message)
    assert seen is not None
    assert (seen.requested_bytes, seen.total_bytes, seen.free_bytes) == (2 * GIB, 8 * GIB, 1 * GIB)
    assert (seen.allocated_bytes, seen.cached_bytes) == (3 * GIB, 1 * GIB)


def test_an_error_followed_by_a_completed_step_is_not_reported(gpu_program: ProbedProgram) -> None:
    gpu_program.run(CAUGHT + "optimizer.step(); raise ValueError('something else')")
    assert gpu_program.message is None
    assert not any(gpu_program.notes.iterdir())


def test_the_step_is_one_more_than_the_optimizers_steps(gpu_program: ProbedProgram) -> None:
    gpu_program.run(
        "import torch; optimizer = torch.optim.Optimizer()\nfor _ in range(40): optimizer.step()" + OUT_OF_GPU_MEMORY
    )
    assert gpu_program.message is not None
    assert gpu_program.message.evidence is not None
    assert gpu_program.message.evidence.step == 41


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("x = [0] * (1 << 60)", ExitCode.HOST_OUT_OF_MEMORY),
        ("import os; raise OSError(12, os.strerror(12))", ExitCode.HOST_OUT_OF_MEMORY),
        ("raise OSError(28, 'No space left on device', '/dev/shm/segment')", ExitCode.SHARED_MEMORY_EXHAUSTED),
        ("raise RuntimeError('CUDA error: out of memory')", ExitCode.DEVICE_OUT_OF_MEMORY),
        (
            "try:\n  raise MemoryError\nexcept MemoryError:\n  raise KeyError('no batch')",
            ExitCode.HOST_OUT_OF_MEMORY,
        ),
    ],
)
def test_errors_of_other_memory_are_reported_without_torch(
    program: ProbedProgram, code: str, exit_code: ExitCode
) -> None:
    ended = program.run(code)
    assert ended.exit_code == 1
    assert program.message is not None
    assert program.message.exit_code == exit_code


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "raise ValueError('a batch of 3, expected 4')",
        "import sys; sys.exit(3)",
        "raise KeyboardInterrupt",
        "raise OSError(28, 'No space left on device', '/data/checkpoint')",
        "try:\n  raise MemoryError\nexcept MemoryError:\n  pass",
    ],
)
def test_other_exits_are_not_reported(program: ProbedProgram, code: str) -> None:
    program.run(code)
    assert program.message is None


def test_the_programs_own_hook_for_exceptions_still_runs(program: ProbedProgram) -> None:
    hook = "import sys\nassert sys.excepthook is sys.__excepthook__\nsys.excepthook = lambda *error: print('mine')\n"
    ended = program.run(hook + "raise MemoryError")
    assert ended.output == "mine\n"
    assert ended.errors == ""
    assert program.message is not None


def test_the_first_process_to_fail_is_reported(gpu_program: ProbedProgram) -> None:
    gpu_program.run(OUT_OF_GPU_MEMORY, environment={"RANK": "1"})
    gpu_program.run(OUT_OF_GPU_MEMORY, environment={"RANK": "0"})
    assert gpu_program.message is not None
    assert gpu_program.message.evidence is not None
    assert gpu_program.message.evidence.rank == 1


def test_a_message_of_the_program_itself_is_kept(program: ProbedProgram) -> None:
    program.run(f"open({str(program.log)!r}, 'w').write('my own words'); raise MemoryError")
    assert program.log.read_text() == "my own words"


def test_the_first_process_reports_for_a_child_that_cannot(gpu_program: ProbedProgram) -> None:
    child = (
        "import os, torch\\ntorch.cuda.use()\\ntry: torch.cuda.run_out_of_memory()\\nexcept RuntimeError: os._exit(1)"
    )
    code = f"""
import os, subprocess, sys
os.environ["RANK"] = "5"
subprocess.run([sys.executable, "-c", "{child}"], cwd={str(gpu_program.directory)!r})
os.environ["RANK"] = "0"
subprocess.run([sys.executable, "-c", "pass"])
assert not os.path.exists(os.environ["RLJOB_TERMINATION_LOG"]), "written by an unrelated process"
sys.exit(1)
"""
    ended = gpu_program.run(code)
    assert ended.errors == ""
    assert gpu_program.message is not None
    assert gpu_program.message.evidence is not None
    assert gpu_program.message.evidence.rank == 5


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_worker_of_multiprocessing_is_reported(gpu_program: ProbedProgram, method: str) -> None:
    code = f"""
import multiprocessing, sys

def work():
    import torch
    torch.cuda.use()
    torch.cuda.run_out_of_memory()

if __name__ == "__main__":
    worker = multiprocessing.get_context({method!r}).Process(target=work)
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
"""
    ended = gpu_program.run(code)
    assert ended.exit_code == 1
    assert gpu_program.message is not None
    assert gpu_program.message.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY


def test_only_the_first_process_reports_kills_by_the_kernel(program: ProbedProgram) -> None:
    report_exit(str(program.log), None, first=False, kills=2)
    assert program.message is None

    report_exit(str(program.log), None, first=True, kills=2)
    assert program.message is not None
    assert program.message.exit_code == ExitCode.HOST_OUT_OF_MEMORY
    assert "killed 2 process(es)" in program.message.message


@pytest.mark.parametrize(
    ("events", "limit", "limit_bytes"),
    [
        ("memory.events", "memory.max", "536870912"),
        ("memory/memory.oom_control", "memory/memory.limit_in_bytes", "536870912"),
        ("memory.events", "memory.max", "max"),
        ("memory/memory.oom_control", "memory/memory.limit_in_bytes", "9223372036854771712"),
    ],
)
def test_both_versions_of_cgroups_are_read(tmp_path: Path, events: str, limit: str, limit_bytes: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / events).write_text("low 0\nhigh 0\noom 7\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / limit).write_text(f"{limit_bytes}\n")
    assert cgroup.oom_kills(str(tmp_path)) == 2
    assert cgroup.memory_limit_bytes(str(tmp_path)) == (512 << 20 if limit_bytes == "536870912" else None)


def test_without_a_cgroup_no_kill_is_reported(tmp_path: Path) -> None:
    assert cgroup.oom_kills(str(tmp_path)) == 0
    assert cgroup.memory_limit_bytes(str(tmp_path)) is None
