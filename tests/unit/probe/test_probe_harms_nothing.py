"""Programs have the same output, errors and exit code with and without the probe."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_probe import start
from tests.unit.probe.probed_program import SITE, EndedProgram, ProbedProgram

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
WITH_FLAGS = "import sys, warnings; print(sys.flags.optimize); raise MemoryError"


def difference(program: ProbedProgram, code: str, *flags: str, cwd: Path | None = None) -> None:
    assert program.run(code, *flags, cwd=cwd) == program.run(code, *flags, cwd=cwd, probed=False)


@pytest.mark.parametrize(
    ("code", "flags"),
    [*((code, ()) for code in PROGRAMS.values()), *((WITH_FLAGS, flags) for flags in FLAGS)],
    ids=[*PROGRAMS, *map(" ".join, FLAGS)],
)
def test_a_program_behaves_as_without_the_probe(program: ProbedProgram, code: str, flags: tuple[str, ...]) -> None:
    difference(program, code, *flags)


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


def test_a_damaged_or_missing_probe_does_no_harm(program: ProbedProgram) -> None:
    copy = program.directory / "copy"
    shutil.copytree(SITE.parent, copy / "rljob_probe")
    site = {"PYTHONPATH": str(copy / "rljob_probe" / "site")}
    for damage in ("raise RuntimeError('damaged')", "this is no Python"):
        (copy / "rljob_probe" / "explanation.py").write_text(damage)
        assert program.run("raise MemoryError", environment=site).errors.endswith("\nMemoryError\n")
        (copy / "rljob_probe" / "start.py").write_text(damage)
        assert program.run("print(1)", environment=site).errors == ""
    missing = program.run("print(1)", environment={"PYTHONPATH": str(program.directory / "not" / "mounted")})
    assert (missing.output, missing.errors) == ("1\n", "")


def test_a_disabled_probe_is_not_loaded(program: ProbedProgram) -> None:
    listing = "import sys; print([name for name in sys.modules if 'probe' in name], len(sys.meta_path))"
    ended = program.run(f"{listing}; raise MemoryError", environment={"RLJOB_PROBE": "0"})
    assert ended.output == program.run(listing, probed=False).output
    assert program.message is None


def test_without_a_termination_log_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLJOB_TERMINATION_LOG", raising=False)
    monkeypatch.setattr(start, "DEFAULT_LOG", "/nowhere")
    before = list(sys.meta_path)
    start.start()
    assert sys.meta_path == before


def test_a_program_without_torch_imports_and_leaves_nothing_more(program: ProbedProgram) -> None:
    listing = "import sys; print('\\n'.join(sorted(sys.modules)))"
    without = set(program.run(listing, probed=False).output.split())
    more = set(program.run(listing).output.split()) - without
    assert {name.partition(".")[0] for name in more} <= {"rljob_probe", "sitecustomize", "__future__", "atexit"}
    assert [path.name for path in program.directory.iterdir()] == ["program.py"]


# --- imports ---


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


def test_the_import_that_finds_torch_loaded_finds_its_module() -> None:
    # Without site packages, the finder after the probe's is that of the builtin modules.
    code = """
import importlib.machinery, sys, types
from rljob_probe.import_hooks import when_torch_is_imported

called = []
for name in ("torch", "torch.cuda"):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
when_torch_is_imported(called.append)
builtin = next(name for name in sys.builtin_module_names if name not in sys.modules)
__import__(builtin)
import graphlib
assert called == [sys.modules["torch"]], called
"""
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": str(SITE.parents[1])}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


SOURCES = sorted(SITE.parent.rglob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_code_is_python_3_8_with_the_standard_library_alone(source: Path) -> None:
    oldest = (3, 4) if source.name == "sitecustomize.py" else (3, 8)
    tree = ast.parse(source.read_text(), feature_version=oldest)
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert imported <= {*sys.stdlib_module_names, "rljob_probe", "sitecustomize"}
    annotated = any(isinstance(node, ast.AnnAssign) or getattr(node, "returns", None) for node in ast.walk(tree))
    assert "__future__" in imported or not annotated, "newer ways to write types would be evaluated"


# --- the image's own sitecustomize and usercustomize ---


def run_with(program: ProbedProgram, own: str, code: str, probed: bool = True) -> EndedProgram:
    place = program.directory / "of-the-image"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(own)
    (place / "usercustomize.py").write_text("print('by the user')")
    path = f"{SITE}{os.pathsep}{place}" if probed else str(place)
    return program.run(code, probed=probed, environment={"PYTHONPATH": path})


TOLD = "import sitecustomize; print(sitecustomize.__file__, sitecustomize.told); raise MemoryError"


@pytest.mark.parametrize(
    ("own", "then"),
    [
        ("told = 'by the image'; print(told)", TOLD),
        ("import sys; sys.path.insert(0, '/added'); told = sys.path[0]", TOLD),
        ("import sys; told = sys.modules[__name__].__name__", TOLD),
        ("raise ValueError('broken')", "raise MemoryError"),
        ("import not_there_at_all", "raise MemoryError"),
        ("this is no Python", "raise MemoryError"),
    ],
)
def test_the_images_own_sitecustomize_works_or_fails_as_ever(program: ProbedProgram, own: str, then: str) -> None:
    code = f"import sys; print([p for p in sys.path if 'probe/site' not in p]); {then}"
    assert run_with(program, own, code) == run_with(program, own, code, probed=False)
    assert program.message is not None


def test_the_probe_is_on_the_path_of_subprocesses_too(program: ProbedProgram) -> None:
    program.run("import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'raise MemoryError']))")
    assert program.message is not None
