"""The image's own sitecustomize and usercustomize run as they would without the probe."""

from __future__ import annotations

import os

import pytest

from tests.unit.probe.probed_program import SITE, Ended, ProbedProgram

LOOK = "import sys, sitecustomize; print(sitecustomize.__file__, sitecustomize.told); raise MemoryError"


def run_with(program: ProbedProgram, own: str, code: str = LOOK, probed: bool = True) -> Ended:
    place = program.directory / "of-the-image"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(own)
    path = f"{SITE}{os.pathsep}{place}" if probed else str(place)
    return program.run(code, probed=probed, environment={"PYTHONPATH": path})


@pytest.mark.parametrize(
    "own",
    [
        "told = 'by the image'; print(told)",
        "import sys; sys.path.insert(0, '/added'); told = sys.path[0]",
        "import sys; told = sys.modules[__name__].__name__",
    ],
)
def test_the_images_own_sitecustomize_runs(program: ProbedProgram, own: str) -> None:
    without = run_with(program, own, probed=False)
    with_probe = run_with(program, own)
    assert (with_probe.exit_code, with_probe.output) == (without.exit_code, without.output)
    assert with_probe.errors == without.errors
    assert program.message is not None


@pytest.mark.parametrize("own", ["raise ValueError('broken')", "import not_there_at_all", "this is no Python"])
def test_a_broken_sitecustomize_fails_as_without_the_probe(program: ProbedProgram, own: str) -> None:
    without = run_with(program, own, "raise MemoryError", probed=False)
    with_probe = run_with(program, own, "raise MemoryError")
    assert with_probe == without
    assert program.message is not None


def test_usercustomize_runs_as_well(program: ProbedProgram) -> None:
    place = program.directory / "of-the-user"
    place.mkdir()
    (place / "usercustomize.py").write_text("print('by the user')")
    code = "import site; print(site.ENABLE_USER_SITE)"
    path = {"PYTHONPATH": f"{SITE}{os.pathsep}{place}"}
    without = program.run(code, probed=False, environment={"PYTHONPATH": str(place)})
    assert program.run(code, environment=path).output == without.output


def test_the_images_path_entries_are_kept(program: ProbedProgram) -> None:
    show = "import sys; print([p for p in sys.path if 'probe/site' not in p])"
    own = "import sys; sys.path[1:1] = ['/added']; told = 1"
    assert run_with(program, own, show).output == run_with(program, own, show, probed=False).output


def test_the_probe_is_on_the_path_of_subprocesses_too(program: ProbedProgram) -> None:
    program.run("import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'raise MemoryError']))")
    assert program.message is not None
