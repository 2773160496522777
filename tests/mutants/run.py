"""Runs the tests on wrong versions of the code, one mutant at a time, and lists the mutants that no test notices.

Each mutant is a change in a temporary copy of its package, which precedes the installed one on the import path: the
working tree is never changed.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).with_name("mutants.toml")
LIBRARIES = {"operator": ("aiohttp", "kopf"), "trainer": ("ray", "torch")}
"""By part: imported once, before a process is forked for each mutant."""
TIMEOUT_SECONDS = 600
"""Time for the tests of a mutant. One that they do not finish with is listed apart: the machine may have been busy."""


Outcome = Literal["killed", "survived", "unfinished"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one file that makes the code wrong."""

    bug: str
    """Wrong behavior, in a sentence without a full stop."""
    file: str
    """Path of the file in the repository: PART/PACKAGE/…"""
    old: str
    """Text that occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest."""

    @property
    def package(self) -> Path:
        return Path(*Path(self.file).parts[:2])

    @property
    def folder(self) -> str:
        return str(Path(self.file).parent)


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """All mutants. Raises ValueError with those that fit their file no longer."""
    mutants = [
        Mutant(**{**given, "tests": tuple(given["tests"])}) for given in tomllib.loads(path.read_text())["mutant"]
    ]
    outdated = [f"{mutant.file}: {mutant.bug}" for mutant in mutants if not fits(mutant)]
    if outdated:
        raise ValueError(
            "expected the old text of each mutant once in its file; found none, or several, for:\n  "
            + "\n  ".join(outdated)
            + f"\nwrite the present text into {path.name}"
        )
    return mutants


def fits(mutant: Mutant) -> bool:
    file = ROOT / mutant.file
    return file.exists() and file.read_text().count(mutant.old) == 1


def outcome_of(package: Path, tests: Sequence[str], mutant: Mutant | None) -> Outcome:
    """The outcome of the tests with a copy of the package that has the mutant; None: with none.

    Raises RuntimeError if pytest cannot run the tests.
    """
    with tempfile.TemporaryDirectory(prefix="rljob-mutant-") as folder:
        copy = Path(folder) / package.name
        shutil.copytree(ROOT / package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            file = copy.parent / Path(mutant.file).relative_to(package.parent)
            file.write_text(file.read_text().replace(mutant.old, mutant.new))
        process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(folder, tests))
        process.start()
        process.join(TIMEOUT_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            return "unfinished"
        if process.exitcode not in (0, 1):
            printed = (Path(folder) / "printed").read_text()[-2000:]
            raise RuntimeError(f"pytest exited with code {process.exitcode} for {' '.join(tests)}:\n{printed}")
        return "killed" if process.exitcode else "survived"


def _run_tests(folder: str, tests: Sequence[str]) -> None:
    """Run the tests in this process, a fork, with the packages in `folder` before the installed ones."""
    with (Path(folder) / "printed").open("w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    os.chdir(ROOT)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{folder}/.hypothesis"
    code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    sys.stdout.flush()
    os._exit(code)


def main(words: Sequence[str] | None = None) -> int:
    """Run the mutants. Returns 1 unless all are killed, 2 if the tests fail without any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="Text in the file or the bug of the mutants to run; default: all.")
    parser.add_argument("--mutants", type=Path, default=MUTANTS, help="File with the mutants.")
    arguments = parser.parse_args(words)
    only = arguments.only
    chosen = [
        m for m in read_mutants(arguments.mutants) if not only or any(text in f"{m.file}: {m.bug}" for text in only)
    ]
    for part in {mutant.package.parts[0] for mutant in chosen}:
        for library in LIBRARIES.get(part, ()):
            importlib.import_module(library)
    for package in sorted({mutant.package for mutant in chosen}):
        tests = sorted({test for mutant in chosen if mutant.package == package for test in mutant.tests})
        if outcome_of(package, tests, None) != "survived":
            print(f"error: expected the tests of {package} to pass without a mutant, found failures: {' '.join(tests)}")
            return 2
    counts: Counter[tuple[str, Outcome]] = Counter()
    for mutant in chosen:
        began = time.monotonic()
        outcome = outcome_of(mutant.package, mutant.tests, mutant)
        counts[mutant.folder, outcome] += 1
        counts["all", outcome] += 1
        print(f"{outcome:10} {time.monotonic() - began:4.0f} s  {mutant.file}: {mutant.bug}", flush=True)
    print("\n" + "".join(f"{outcome:>12}" for outcome in OUTCOMES) + "  folder")
    for folder in [*dict.fromkeys(mutant.folder for mutant in chosen), "all"]:
        print("".join(f"{counts[folder, outcome]:12}" for outcome in OUTCOMES) + f"  {folder}")
    return 0 if counts["all", "killed"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
