"""Creates placeholders for NVIDIA's libraries, so that a CUDA build of torch loads on a CPU without 3 GB of unused
code.

The package index has torch for Linux only as a CUDA build. Its libraries name cuBLAS, cuDNN, NCCL and others, and
Python's loader wants every name resolved, so `import torch` fails where they are left out. This puts one small library
in their place, under each of their names, which defines each function that torch names. None is called where no NVIDIA
driver is, since torch asks for a device first; should one be called all the same, the process ends and says which.

Runs while the CPU image is built, by that image's Python; needs a C compiler.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TORCH_LIBRARIES = Path(sysconfig.get_path("platlib")) / "torch" / "lib"
PLACEHOLDERS = "libcuda_placeholders.so"

PROLOGUE = """
#include <stdio.h>
#include <stdlib.h>
static _Noreturn void refuse(const char *function) {
  fprintf(stderr, "RLJob's CPU image has no NVIDIA libraries, but %s was called. "
                  "On machines with GPUs use the image that is built with DEVICE=gpu.\\n", function);
  abort();
}
"""


class Function(NamedTuple):
    """A function that a library refers to; `version` is the requested symbol version, or empty."""

    name: str
    version: str


class Unresolved(NamedTuple):
    """Libraries and functions that the dynamic loader does not find when it loads a library."""

    libraries: tuple[str, ...]
    functions: tuple[Function, ...]


def main() -> None:
    # The library that Python's torch loads, and with it all others.
    report = loader_report(TORCH_LIBRARIES / "libtorch_python.so")
    unresolved = read_loader_report(report)
    compile_library(unresolved.functions, TORCH_LIBRARIES / PLACEHOLDERS)
    for library in unresolved.libraries:
        (TORCH_LIBRARIES / library).symlink_to(PLACEHOLDERS)
    print(f"{len(unresolved.functions)} functions of {len(unresolved.libraries)} libraries have placeholders")


def loader_report(library: Path) -> str:
    """Report of `ldd` about the library's dependencies and each of its symbols."""
    ldd = subprocess.run(["ldd", "-r", str(library)], capture_output=True, text=True, check=False, encoding="utf-8")
    return ldd.stdout + ldd.stderr


def read_loader_report(report: str) -> Unresolved:
    """The missing libraries and functions in `ldd -r`'s report, without those that the Python interpreter defines."""
    libraries = re.findall(r"^\s*(\S+) => not found", report, re.MULTILINE)
    symbols = re.findall(r"^undefined symbol: (\w+)(?:, version (\S+))?", report, re.MULTILINE)
    functions = {Function(name, version) for name, version in symbols if not re.match("_?Py", name)}
    return Unresolved(tuple(sorted(set(libraries))), tuple(sorted(functions)))


def compile_library(functions: Sequence[Function], output: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        source, versions = Path(directory, "placeholders.c"), Path(directory, "versions.map")
        source.write_text(placeholder_source(functions), encoding="utf-8")
        versions.write_text(version_script(functions), encoding="utf-8")
        linker = f"-Wl,--version-script={versions},-soname={output.name}"
        subprocess.run(["gcc", "-shared", "-fPIC", "-Os", linker, "-o", str(output), str(source)], check=True)


def placeholder_source(functions: Sequence[Function]) -> str:
    return PROLOGUE + "".join(f'void {name}(void) {{ refuse("{name}"); }}\n' for name, _ in functions)


def version_script(functions: Sequence[Function]) -> str:
    """Linker script that gives each function the symbol version that torch requests."""
    by_version: Mapping[str, list[str]] = defaultdict(list)
    for name, version in functions:
        if version:
            by_version[version].append(name)
    return "".join(
        f"{version} {{ {' '.join(f'{name};' for name in names)} }};\n" for version, names in by_version.items()
    )


if __name__ == "__main__":
    main()
