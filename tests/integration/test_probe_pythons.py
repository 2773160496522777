"""The probe on every Python that this machine has, however old."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
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
def test_a_program_fails_as_without_the_probe_and_from_3_8_on_it_is_told(python: Path, tmp_path: Path) -> None:
    program = ProbedProgram(tmp_path, python=python)
    for flags in ((), ("-W", "error"), ("-S",), ("-E",)):
        assert program.run("print('well')", *flags) == program.run("print('well')", *flags, probed=False)
    assert program.run(PROGRAM) == program.run(PROGRAM, probed=False)
    if version(python) < (3, 8):
        assert program.message is None
    else:
        assert program.message is not None
        assert program.message.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY
