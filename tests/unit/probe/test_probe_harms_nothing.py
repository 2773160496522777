"""Programs have the same output, errors and exit code with and without the probe."""

from __future__ import annotations

import shutil
import sys

import pytest

from rljob_probe import start
from tests.unit.probe.probed_program import SITE, ProbedProgram

PROGRAMS = {
    "nothing": "",
    "exit code": "import sys; sys.exit(7)",
    "exit code by the system": "import os; os._exit(9)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "exception": "raise ValueError('wrong')",
    "fork": "import os\npid = os.fork()\nprint(os.waitpid(pid, 0)[1] if pid else 'child')",
    "fork and exit": "import os, sys\npid = os.fork()\nif not pid: sys.exit(5)\nprint(os.waitpid(pid, 0)[1])",
    "exec": "import os, sys\nsys.stdout.flush(); os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "threads": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()",
    "thread at the end": "import threading\nthreading.Thread(target=lambda: print('late')).start()",
    "at exit": "import atexit\natexit.register(print, 'bye')",
    "pool": "import multiprocessing\nif __name__ == '__main__':\n"
    "  with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(abs, [-1, 2]))",
    "recursion": "def f(): f()\nf()",
    "own json": "import sys; sys.modules['json'] = None; raise MemoryError",
    "closed streams": "import sys; sys.stderr = sys.stdout = None; raise MemoryError",
    "subprocess": "import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(3)']))",
}
FLAGS = [(), ("-S",), ("-I",), ("-E",), ("-s",), ("-O",), ("-B",), ("-X", "dev"), ("-W", "error")]


def difference(program: ProbedProgram, code: str, *flags: str, **run: object) -> None:
    without = program.run(code, *flags, probed=False, **run)  # type: ignore[arg-type]
    with_probe = program.run(code, *flags, **run)  # type: ignore[arg-type]
    assert with_probe == without


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_behaves_as_without_the_probe(program: ProbedProgram, name: str) -> None:
    difference(program, PROGRAMS[name])


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_an_interpreter_with_other_flags_behaves_as_without_the_probe(
    program: ProbedProgram, flags: tuple[str, ...]
) -> None:
    difference(program, "import sys, warnings; print(sys.flags.optimize); raise MemoryError", *flags)


@pytest.mark.parametrize(
    "environment",
    [
        {"RLJOB_TERMINATION_LOG": "/nowhere/at/all"},
        {"RLJOB_TERMINATION_LOG": "/proc/version"},
        {"RLJOB_TERMINATION_LOG": "/"},
        {"RLJOB_PROBE_NOTES": "/proc/nowhere"},
        {"RLJOB_ATTEMPT": "first", "RANK": "-1", "RLJOB_ROLE": "driver", "RLJOB_PROBE_FIRST": "me"},
        {"PYTHONPATH": f"{SITE}::/nowhere:relative:\udcff:{SITE}"},
        {"PYTHONWARNINGS": "error"},
        {"HOME": "", "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"},
    ],
    ids=str,
)
def test_a_broken_environment_does_no_harm(gpu_program: ProbedProgram, environment: dict[str, str]) -> None:
    code = "import torch; torch.cuda.use(); torch.cuda.run_out_of_memory()"
    ended = gpu_program.run(code, environment=environment)
    assert ended.exit_code == 1
    assert ended.errors.endswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert ended.errors.count("Traceback") == 1


def test_a_directory_that_has_gone_does_no_harm(program: ProbedProgram) -> None:
    code = """
import os, subprocess, sys
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
sys.exit(subprocess.call([sys.executable, "-c", "raise MemoryError"]))
"""
    difference(program, code, cwd=program.directory)
    assert program.message is not None


def test_a_damaged_probe_does_no_harm(program: ProbedProgram) -> None:
    copy = program.directory / "copy"
    shutil.copytree(SITE.parent, copy / "rljob_probe")
    site = {"PYTHONPATH": str(copy / "rljob_probe" / "site")}
    for damage in ("raise RuntimeError('damaged')", "this is no Python"):
        (copy / "rljob_probe" / "explanation.py").write_text(damage)
        assert program.run("raise MemoryError", environment=site).errors.endswith("\nMemoryError\n")
        (copy / "rljob_probe" / "start.py").write_text(damage)
        assert program.run("print(1)", environment=site).errors == ""


def test_an_unreadable_probe_does_no_harm(program: ProbedProgram) -> None:
    missing = program.run("print(1)", environment={"PYTHONPATH": str(program.directory / "not" / "mounted")})
    assert (missing.output, missing.errors) == ("1\n", "")


def test_a_disabled_probe_is_not_loaded(program: ProbedProgram) -> None:
    ended = program.run(
        "import sys; print([name for name in sys.modules if 'probe' in name], len(sys.meta_path)); raise MemoryError",
        environment={"RLJOB_PROBE": "0"},
    )
    without = program.run("import sys; print([], len(sys.meta_path))", probed=False)
    assert ended.output == without.output
    assert program.message is None


def test_without_a_termination_log_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLJOB_TERMINATION_LOG", raising=False)
    monkeypatch.setattr(start, "DEFAULT_LOG", "/nowhere")
    before = list(sys.meta_path)
    start.start()
    assert sys.meta_path == before


def test_a_successful_program_leaves_no_files_of_the_probe(program: ProbedProgram) -> None:
    before = set(program.directory.iterdir())
    program.run("print(1)")
    assert set(program.directory.iterdir()) - before <= {program.directory / "program.py"}


def test_a_program_that_imports_no_torch_imports_nothing_more_than_before(program: ProbedProgram) -> None:
    listing = "import sys; print('\\n'.join(sorted(sys.modules)))"
    without = set(program.run(listing, probed=False).output.split())
    more = set(program.run(listing).output.split()) - without
    assert {name.partition(".")[0] for name in more} <= {"rljob_probe", "sitecustomize", "__future__", "atexit"}


def test_programs_see_the_same_torch(gpu_program: ProbedProgram) -> None:
    code = """
import importlib.util, inspect, sys
print(importlib.util.find_spec("torch").origin)
import torch
print(type(torch.__loader__), vars(torch.__loader__), torch.__spec__.origin, torch.__path__)
print(inspect.getsource(torch))
finders = [type(finder).__module__ for finder in sys.meta_path if not isinstance(finder, type)]
print([module for module in finders if not module.startswith("rljob_probe")])
"""
    difference(gpu_program, code)


def test_a_torch_that_cannot_be_imported_fails_as_without_the_probe(program: ProbedProgram) -> None:
    (program.directory / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    difference(program, "try:\n  import torch\nexcept OSError as error: print(error)\nimport torch")
