"""A series of benchmark programs: it starts each, kills leftover processes, and does not repeat successful programs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from bench.programs.series import Program, programs_of
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_testing.repository import ROOT

LEAVES_A_PROCESS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
{then}
"""

SERIES = "# two programs\n{slow_seconds} slow\n\n120 quick --option 'two words'\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with this program and two others, one of which takes too long. Both leave a process behind."""
    programs = tmp_path / "bench" / "programs"
    programs.mkdir(parents=True)
    (programs / "series.py").write_bytes((ROOT / "bench" / "programs" / "series.py").read_bytes())
    (programs / "quick.py").write_text(LEAVES_A_PROCESS.format(then="print(sys.argv[1:])"))
    (programs / "slow.py").write_text(LEAVES_A_PROCESS.format(then="time.sleep(600)"))
    (tmp_path / "series.txt").write_text(SERIES.format(slow_seconds=3))
    return tmp_path


def run(repository: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.programs.series", "series.txt", "--output", "logs", *options]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=repository, env=variables, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )


def test_a_program_that_takes_too_long_does_not_keep_the_next_from_running(repository: Path) -> None:
    (repository / "series.txt").write_text(SERIES.format(slow_seconds=20))  # enough to start its child
    ran = run(repository)
    assert ran.returncode == 1, ran.stderr
    logs = [(repository / "logs" / name).read_text().split() for name in ("02-slow.log", "04-quick.log")]
    assert not [pid for _, pid, *_ in logs if psutil.pid_exists(int(pid))]
    assert logs[1][2:] == ["['--option',", "'two", "words']"]


def test_a_later_call_runs_only_what_has_not_succeeded(repository: Path) -> None:
    run(repository)
    (repository / "logs" / "04-quick.log").unlink()
    (repository / "bench" / "programs" / "slow.py").write_text("")
    (repository / "series.txt").write_text(SERIES.format(slow_seconds=120))
    assert run(repository).returncode == 0
    assert not (repository / "logs" / "04-quick.log").exists()


def test_a_program_that_could_not_end_in_time_is_not_started(repository: Path) -> None:
    ran = run(repository, "--seconds", "10")
    assert "not started, for lack of time: quick" in ran.stdout
    assert not (repository / "logs" / "04-quick.log").exists()


def test_a_line_without_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2: expected SECONDS PROGRAM"):
        programs_of("10 fuzz\n20\n")


@pytest.mark.parametrize("file", sorted((ROOT / "bench" / "series").iterdir()), ids=lambda file: file.name)
def test_the_series_in_the_repository_have_programs_that_exist(file: Path) -> None:
    programs = programs_of(file.read_text())
    assert programs
    assert not [program for program in programs if find_spec(f"bench.programs.{program.module}") is None]
    assert len({program.line for program in programs}) == len(programs)


def test_a_program_is_named_by_its_line() -> None:
    assert Program(1, 10, "large_models", ("8b", "--steps", "5")).line == "large_models 8b --steps 5"
