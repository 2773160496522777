"""Checks the options that diagnoses advise against the packages that have them.

    .venv/bin/python -m bench.programs.program_options [--wheels DIR] [--output DIR]

Downloads the wheels of the trainers and engines of `rljob_memory/programs/programs.toml`, without their dependencies,
and looks for the definition of every part of every option's name: a field, a key, or a quoted name or flag. Wheels that
are in DIR already are not downloaded again. Writes program_options.json: a row for each version of a program, with the
options that it has and those that it lacks. The versions are the one that the options were read from, and an older one
for each name that newer versions no longer have.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.record import RESULTS, record
from rljob_memory.programs import PROGRAMS, Option

_SOURCES = (".py", ".yaml", ".yml", ".json")
_NOTE = "an option is found if every part of its name is defined in the package, or in one that it is configured by"
_NOT_ON_THE_INDEX = ("easyr1", "slime", "nemo-rl", "prime-rl")
"""Absent there, or empty packages of that name: these options were read from their repositories."""


@dataclass(frozen=True)
class Release:
    """A version of a program."""

    program: str
    package: str
    version: str
    beside: tuple[str, ...] = ()
    """Packages whose options it has too: `NAME==VERSION`."""

    @property
    def requirements(self) -> tuple[str, ...]:
        return (f"{self.package}=={self.version}", *self.beside)

    @property
    def options(self) -> list[Option]:
        """The options that this version should have."""
        return [option for option in PROGRAMS[self.program].options if option.is_of(self.version)]


RELEASES = (
    Release("trl", "trl", "1.16.0", ("transformers==5.17.0",)),
    Release("trl", "trl", "1.10.0", ("transformers==5.17.0",)),
    Release("trl", "trl", "0.21.0", ("transformers==5.17.0",)),
    Release("verl", "verl", "0.9.1"),
    Release("verl", "verl", "0.6.1"),
    Release("skyrl", "skyrl", "0.3.0"),
    Release("areal", "areal", "1.0.4"),
    Release("openrlhf", "openrlhf", "0.11.2"),
    Release("openrlhf", "openrlhf", "0.9.0"),
    Release("trinity", "trinity_rft", "0.6.0"),
    Release("unsloth", "unsloth", "2026.10.9", ("unsloth_zoo==2026.10.9", "transformers==5.17.0")),
    Release("vllm", "vllm", "0.26.0"),
    Release("vllm", "vllm", "0.11.2"),
    Release("sglang", "sglang", "0.5.23"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels, which downloads are added to")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.wheels or Path(scratch)
        rows = [
            _row(release, [_wheel(requirement, folder) for requirement in release.requirements]) for release in RELEASES
        ]
    rows += [{"program": program, "package": None} for program in _NOT_ON_THE_INDEX]
    print(record("program_options", rows, _NOTE, arguments.output))
    missing = [f"{row['package']} {row['version']}: {name}" for row in rows for name in row.get("missing", ())]
    print("\n".join(missing), file=sys.stderr)
    return 1 if missing else 0


def _wheel(requirement: str, folder: Path) -> Path:
    """The wheel of `NAME==VERSION` in `folder`, downloaded if it is not there."""
    name, _, version = requirement.partition("==")
    pattern = f"{name}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d")
        subprocess.run([*command, str(folder), requirement], check=True)
    return next(folder.glob(pattern))


def _row(release: Release, wheels: list[Path]) -> dict[str, Any]:
    defined = {part: False for option in release.options for part in _parts(option.name)}
    for text in _sources(wheels):
        for part, known in defined.items():
            if not known and _defines(part, text):
                defined[part] = True
    found = {option.name: all(defined[part] for part in _parts(option.name)) for option in release.options}
    return {
        "program": release.program,
        "package": release.package,
        "version": release.version,
        "beside": list(release.beside),
        "found": sorted(name for name, there in found.items() if there),
        "missing": sorted(name for name, there in found.items() if not there),
    }


def _sources(wheels: list[Path]) -> Iterator[str]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                if entry.endswith(_SOURCES):
                    yield archive.read(entry).decode("utf-8", "replace")


def _parts(name: str) -> list[str]:
    """A flag is one name, with its dots; a dotted name has a part for each section."""
    return [name] if name.startswith("--") else name.split(".")


def _defines(part: str, text: str) -> bool:
    """True if the text has a field or key of that name, or the name as a string, as parsers of arguments have."""
    field = part.lstrip("-").replace("-", "_")
    if part not in text and field not in text:
        return False
    name = re.escape(part)
    of_a_flag = rf"|^\s*{re.escape(field)}\s*:" if part.startswith("--") else ""
    return re.search(rf"^\s*[\"']?{name}[\"']?\s*[:=]|[\"']{name}[\"'=]{of_a_flag}", text, re.MULTILINE) is not None


if __name__ == "__main__":
    sys.exit(main())
