"""The probe reports programs that exit because memory ran out, and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.exit_codes import ExitCode
from rljob_api.termination_message import MAX_TERMINATION_MESSAGE_BYTES, read_termination_message
from rljob_probe import cgroup, notes
from rljob_probe.explanation import encoded, explanation_of, report_exit
from rljob_probe.failure import memory_failure
from tests.unit.probe.probed_program import SITE, ProbedProgram, write_fake_torch

GIB = 1 << 30
TORCH_ERROR = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
OUT_OF_GPU_MEMORY = "import torch\ntorch.cuda.use()\ntorch.cuda.run_out_of_memory()\n"
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
    assert ended.errors.endswith(f"{TORCH_ERROR}\n")
    message, evidence = gpu_program.message, gpu_program.evidence
    assert message is not None
    assert message.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY
    assert "rank 3 ran out of GPU memory" in message.message
    assert (evidence.rank, evidence.role, evidence.attempt, evidence.step) == (3, "policy", 2, 1)
    assert evidence.message == TORCH_ERROR
    assert evidence.failure is not None
    assert evidence.failure.stack[-1].endswith("in run_out_of_memory")
    memory = evidence.memory
    assert memory is not None
    assert (memory.allocated_bytes, memory.reserved_bytes) == (3 * GIB, 4 * GIB)
    assert (memory.peak_allocated_bytes, memory.peak_reserved_bytes) == (5 * GIB, 6 * GIB)
    assert (memory.device_free_bytes, memory.device_total_bytes) == (1 * GIB, 8 * GIB)
    assert memory.peak_rss_bytes > 0


@pytest.mark.parametrize("way_out", ["sys.exit(1)", "raise SystemExit('cannot go on')", "raise ValueError('and so')"])
def test_a_caught_error_that_ends_the_program_is_reported(gpu_program: ProbedProgram, way_out: str) -> None:
    assert gpu_program.run(CAUGHT + way_out).exit_code == 1
    assert gpu_program.evidence.failure is not None
    seen = gpu_program.evidence.failure.device
    assert seen is not None
    assert (seen.requested_bytes, seen.total_bytes, seen.free_bytes) == (2 * GIB, 8 * GIB, 1 * GIB)
    assert (seen.allocated_bytes, seen.cached_bytes) == (3 * GIB, 1 * GIB)


def test_an_error_followed_by_a_completed_step_is_not_reported(gpu_program: ProbedProgram) -> None:
    gpu_program.run(CAUGHT + "optimizer.step(); raise ValueError('something else')")
    assert gpu_program.message is None
    assert not any(gpu_program.notes.iterdir())


def test_step_and_phase_are_those_of_the_optimizer_and_the_source(gpu_program: ProbedProgram) -> None:
    generation = gpu_program.directory / "transformers" / "generation"
    generation.mkdir(parents=True)
    (generation.parent / "__init__.py").touch()
    (generation / "__init__.py").touch()
    (generation / "sampling.py").write_text("import torch\ndef sample(): torch.cuda.run_out_of_memory()")
    gpu_program.run(
        "import torch; torch.cuda.use(); optimizer = torch.optim.Optimizer()\nfor _ in range(40): optimizer.step()\n"
        "from transformers.generation import sampling; sampling.sample()"
    )
    assert (gpu_program.evidence.step, gpu_program.evidence.phase) == (41, "rollout")


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        ("x = [0] * (1 << 60)", ExitCode.HOST_OUT_OF_MEMORY),
        ("import os; raise OSError(12, os.strerror(12))", ExitCode.HOST_OUT_OF_MEMORY),
        ("raise OSError(28, 'No space left on device', '/dev/shm/segment')", ExitCode.SHARED_MEMORY_EXHAUSTED),
        ("raise RuntimeError('CUDA error: out of memory')", ExitCode.DEVICE_OUT_OF_MEMORY),
        ("try:\n  raise MemoryError\nexcept MemoryError:\n  raise KeyError('no batch')", ExitCode.HOST_OUT_OF_MEMORY),
        ("try:\n  raise MemoryError\nexcept MemoryError:\n  pass", None),
        ("raise OSError(28, 'No space left on device', '/data/checkpoint')", None),
        ("raise ValueError('a batch of 3, expected 4')", None),
        ("raise KeyboardInterrupt", None),
        ("import sys; sys.exit(3)", None),
    ],
)
def test_errors_of_any_memory_are_reported_without_torch(
    program: ProbedProgram, code: str, reported: ExitCode | None
) -> None:
    program.run(code)
    assert (program.message and program.message.exit_code) == reported


def test_the_programs_own_hook_for_exceptions_still_runs(program: ProbedProgram) -> None:
    hook = "import sys\nassert sys.excepthook is sys.__excepthook__\nsys.excepthook = lambda *error: print('mine')\n"
    ended = program.run(hook + "raise MemoryError")
    assert (ended.output, ended.errors) == ("mine\n", "")
    assert program.message is not None


def test_the_first_message_stays(gpu_program: ProbedProgram) -> None:
    for rank in ("1", "0"):
        gpu_program.run(OUT_OF_GPU_MEMORY, environment={"RANK": rank})
    assert gpu_program.evidence.rank == 1
    gpu_program.run(f"open({str(gpu_program.log)!r}, 'w').write('my own words'); raise MemoryError")
    assert gpu_program.log.read_text() == "my own words"


def test_the_first_process_reports_for_a_child_that_cannot(gpu_program: ProbedProgram) -> None:
    child = "import os, torch\ntorch.cuda.use()\ntry: torch.cuda.run_out_of_memory()\nexcept RuntimeError: os._exit(1)"
    ended = gpu_program.run(f"""
import os, subprocess, sys
os.environ["RANK"] = "5"
subprocess.run([sys.executable, "-c", {child!r}], cwd={str(gpu_program.directory)!r})
os.environ["RANK"] = "0"
subprocess.run([sys.executable, "-c", "pass"])
assert not os.path.exists(os.environ["RLJOB_TERMINATION_LOG"]), "written by an unrelated process"
sys.exit(1)
""")
    assert ended.errors == ""
    assert gpu_program.evidence.rank == 5


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_worker_of_multiprocessing_is_reported(gpu_program: ProbedProgram, method: str) -> None:
    ended = gpu_program.run(f"""
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
""")
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
    ("events", "limit", "text", "limit_bytes"),
    [
        ("memory.events", "memory.max", "536870912", 512 << 20),
        ("memory/memory.oom_control", "memory/memory.limit_in_bytes", "536870912", 512 << 20),
        ("memory.events", "memory.max", "max", None),
        ("memory/memory.oom_control", "memory/memory.limit_in_bytes", "9223372036854771712", None),
    ],
)
def test_both_versions_of_cgroups_are_read(
    tmp_path: Path, events: str, limit: str, text: str, limit_bytes: int | None
) -> None:
    assert (cgroup.oom_kills(str(tmp_path)), cgroup.memory_limit_bytes(str(tmp_path))) == (0, None)
    (tmp_path / "memory").mkdir()
    (tmp_path / events).write_text("low 0\nhigh 0\noom 7\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / limit).write_text(f"{text}\n")
    assert (cgroup.oom_kills(str(tmp_path)), cgroup.memory_limit_bytes(str(tmp_path))) == (2, limit_bytes)


# --- the observer ---


def test_torch_is_observed_once_the_program_uses_cuda(gpu_program: ProbedProgram) -> None:
    code = "from torch import cuda; print(cuda.used, len(cuda.observers)); cuda.use(); print(len(cuda.observers))"
    assert gpu_program.run(code).output == "False 0\n1\n"
    (gpu_program.directory / "sitecustomize.py").write_text("import torch")
    path = f"{SITE}:{gpu_program.directory}"
    assert gpu_program.run(code, environment={"PYTHONPATH": path}).output == "False 0\n1\n"


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
    ended = program.run(OUT_OF_GPU_MEMORY)
    assert ended.exit_code == 1
    assert ended.errors.endswith(f"\n{TORCH_ERROR}\n")
    assert ended.errors.count("Traceback") == 1
    assert program.message is not None


# --- notes of processes that are killed, or discard theirs, while another one reads them ---


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(notes.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(notes, "_own", None)
    return tmp_path


def test_the_earliest_whole_and_recent_note_of_others_counts(directory: Path) -> None:
    def noted(pid: int, text: str, seconds_ago: float) -> None:
        path = directory / f"{pid}.json"
        path.write_text(text)
        changed_at = path.stat().st_mtime - seconds_ago
        os.utime(path, (changed_at, changed_at))

    noted(1, '{"message": "old"}', seconds_ago=2 * notes.STALE_SECONDS)
    (directory / "2.json.part").write_text("{}")
    (directory / "3.json").symlink_to(directory / "gone.json")
    assert notes.earliest_of_others() is None
    noted(4, '{"message": "CUDA out', seconds_ago=60)
    noted(5, '{"message": "whole"}', seconds_ago=30)
    noted(6, '{"message": "later"}', seconds_ago=0)
    assert notes.earliest_of_others() == {"message": "whole"}


def test_a_note_is_whole_once_it_has_its_name(directory: Path) -> None:
    notes.save({"message": "own"})
    [path] = directory.iterdir()
    assert path.name == f"{os.getpid()}.json"
    assert json.loads(path.read_text()) == {"message": "own"}
    assert notes.earliest_of_others() is None


# --- messages ---

TEXT = st.text(max_size=3000) | st.text(alphabet='\x00\x1b"\\é€🙂\udcff', min_size=1, max_size=3000)


@given(words=TEXT, exit_code=st.sampled_from([80, 81, 82]))
def test_any_text_of_an_error_is_classified_fits_and_is_read(words: str, exit_code: int) -> None:
    memory_failure(RuntimeError(words))
    evidence: dict[str, Any] = {
        "time": "2026-01-01T00:00:00Z", "attempt": 10**6, "role": "rollout", "rank": 10**6, "step": 10**9,
        "phase": "checkpoint", "message": words,
        "memory": {"role": "rollout", "rank": 10**6, "peakRssBytes": 1 << 60, "deviceFreeBytes": 1 << 60},
    }  # fmt: skip
    explanation = explanation_of(exit_code, evidence)
    text = encoded(explanation.exit_code, explanation.message, explanation.evidence)
    assert len(text) <= MAX_TERMINATION_MESSAGE_BYTES
    message = read_termination_message(text.decode())
    assert message is not None
    assert message.exit_code == exit_code
    assert message.evidence is not None
